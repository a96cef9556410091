"""From what processes leave behind to a status and its root cause."""

import dataclasses
import os
import signal
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from nfold.core.measurement import RankSamples
from nfold.engines.base import Phase
from nfold.launch import verdict
from nfold.launch.handoff import HandoffFolder, HeartbeatWriter, RankFailure
from nfold.launch.supervisor import TreeExit
from nfold.launch.verdict import determine_status, read_outcome

KILL, TERM = -signal.SIGKILL, -signal.SIGTERM


def _failure(rank: int, status: str = "crashed", *, collateral: bool = False) -> RankFailure:
    return RankFailure(
        rank=rank, status=status, text=f"rank {rank} says", step=3, collateral=collateral
    )


def test_all_well() -> None:
    assert determine_status(TreeExit(exit_code=0), [], {}, 2, 2) == ("ok", None)


def test_an_end_without_samples_is_no_crash_if_the_exit_code_is_0() -> None:
    status, cause = determine_status(TreeExit(exit_code=0), [], {}, 1, 2)
    assert status == "unsupported"
    assert cause is not None
    assert determine_status(TreeExit(exit_code=1), [], {}, 1, 2)[0] == "crashed"


def test_a_script_that_ended_early_is_no_crash_and_has_its_steps() -> None:
    ended = RankFailure(rank=0, status="unsupported", text="ended with exit code 0", step=7)
    status, cause = determine_status(TreeExit(exit_code=1), [ended], {}, 0, 1)
    assert cause is not None
    assert (status, cause.step) == ("unsupported", 7)


def test_a_stopped_rank_is_named_as_stopped() -> None:
    ending = TreeExit(hung=(1, 3), is_hung_rank_stopped=True)
    _, cause = determine_status(ending, [], {}, 0, 2)
    assert cause is not None
    assert cause.rank == 1
    assert "SIGSTOP" in cause.text


@pytest.mark.parametrize("status", ["oom", "diverged", "crashed"])
def test_a_failure_of_its_own_comes_before_collateral_ones(status: str) -> None:
    failures = [_failure(0, collateral=True), _failure(1, status)]
    got, cause = determine_status(TreeExit(exit_code=1), failures, {0: TERM, 1: 1}, 0, 2)
    assert got == status
    assert cause is not None
    assert (cause.rank, cause.step) == (1, 3)


def test_a_killed_rank_comes_before_those_that_lost_it() -> None:
    failures = [_failure(0, collateral=True)]
    status, cause = determine_status(TreeExit(exit_code=1), failures, {0: 1, 1: KILL}, 0, 2)
    assert status == "killed"
    assert cause is not None
    assert (cause.rank, cause.signal) == (1, 9)


def test_a_rank_that_left_without_a_word_comes_before_those_that_lost_it() -> None:
    failures = [_failure(0, collateral=True)]
    status, cause = determine_status(TreeExit(exit_code=1), failures, {0: 1, 1: 7}, 0, 2)
    assert status == "crashed"
    assert cause is not None
    assert cause.rank == 1
    assert "exited with code 7" in cause.text


def test_what_the_agent_terminated_is_not_the_cause() -> None:
    _, cause = determine_status(TreeExit(exit_code=1), [], {0: TERM, 1: KILL}, 0, 2)
    assert cause is not None
    assert cause.rank == 1


def test_a_terminated_rank_is_the_cause_where_nothing_else_is() -> None:
    status, cause = determine_status(TreeExit(exit_code=1), [], {1: TERM}, 0, 2)
    assert status == "killed"
    assert cause is not None
    assert (cause.rank, cause.signal) == (1, 15)


def test_a_killed_single_process_and_a_killed_agent() -> None:
    alone = determine_status(TreeExit(exit_code=KILL), [], {}, 0, 1)[1]
    agent = determine_status(TreeExit(exit_code=KILL), [], {}, 0, 2)[1]
    assert alone is not None
    assert alone.rank == 0
    assert agent is not None
    assert agent.rank is None


def test_a_hang_and_a_request_to_stop() -> None:
    status, cause = determine_status(TreeExit(hung=(2, 17)), [_failure(0)], {}, 0, 4)
    assert status == "hung"
    assert cause is not None
    assert (cause.rank, cause.step) == (2, 17)
    status, cause = determine_status(
        TreeExit(timed_out=(41.6, 17), seconds_since_step=30.0), [_failure(0)], {}, 0, 4
    )
    assert status == "interrupted"
    assert cause is not None
    assert (cause.step, cause.stalled_s) == (17, 30.0)
    assert "42 s" in cause.text
    started = TreeExit(timed_out=(60.0, 0), hung_calls=((0, "train.py:8"),))
    _, cause = determine_status(started, [], {}, 0, 1)
    assert cause is not None
    assert cause.text.endswith("after step 0; rank 0 is in train.py:8")
    status, cause = determine_status(TreeExit(stop_signal=signal.SIGINT), [_failure(0)], {}, 0, 4)
    assert status == "interrupted"
    assert cause is not None
    assert cause.signal == signal.SIGINT


STACK = (
    "Thread 0x7 (most recent call first):\n"
    '  File "/lib/site-packages/torch/some.py", line 1 in {}\n'
    '  File "/home/me/train.py", line {} in train\n'
)


def _folder(path: Path, steps: Mapping[int, int], finished: Collection[int] = ()) -> HandoffFolder:
    path.mkdir()
    folder = HandoffFolder(path)
    for rank, step in steps.items():
        phase = Phase.FINISHED if rank in finished else Phase.STEPPING
        heart = HeartbeatWriter(folder.reports.heartbeat_file(rank), os.getpid(), is_inferred=True)
        heart.beat(phase, step, 0, 1)
        heart.close()
    return folder


def _write_stacks(folder: HandoffFolder, *places: tuple[str, int]) -> None:
    for rank, place in enumerate(places):
        folder.stack_file(rank).write_text(STACK.format(*place))


@pytest.mark.parametrize("ending", [TreeExit(hung=(0, 60)), TreeExit(exit_code=1)])
def test_ranks_that_wait_in_different_places_are_out_of_step(
    tmp_path: Path, ending: TreeExit
) -> None:
    folder = _folder(tmp_path / "run", {0: 60, 1: 61})
    _write_stacks(folder, ("all_reduce", 37), ("backward", 31))
    if ending.hung is None:
        folder.agent.write_exit_codes({0: -signal.SIGABRT})  # gloo aborts if sizes differ
    outcome = read_outcome(folder, ending, 2)
    assert outcome.cause is not None
    assert outcome.cause.out_of_step
    assert "rank 0 is in all_reduce (train.py:37) after step 60" in outcome.cause.text
    assert "rank 1 is in backward (train.py:31) after step 61" in outcome.cause.text


def test_batches_without_a_step_are_named_where_ranks_are_out_of_step(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "run", {0: 120, 1: 120})
    _write_stacks(folder, ("all_reduce", 62), ("backward", 38))
    for rank, skipped in enumerate((0, 2)):
        folder.reports.write_samples(
            RankSamples(rank=rank, device="cpu", batches_per_epoch=120, skipped_batches=skipped)
        )
    outcome = read_outcome(folder, TreeExit(hung=(0, 60)), 2)
    assert outcome.cause is not None
    assert (
        "batches were taken without a step, 0 on rank 0 and 2 on rank 1; next: let all ranks skip"
        in outcome.cause.text
    )


@pytest.mark.parametrize(
    ("log", "out_of_step"),
    [("what(): op.preamble.length <= op.nbytes. 15 vs 4.", True), ("malloc(): corrupted", False)],
)
def test_an_abort_in_a_collective_that_others_are_not_in(
    tmp_path: Path, log: str, *, out_of_step: bool
) -> None:
    """The agent may end the others before they notice and report their places."""
    folder = _folder(tmp_path / "run", {0: 558, 1: 558})
    folder.stack_file(1).write_text(STACK.format("all_reduce", 42))
    folder.rank_log(1).write_text(log)
    folder.agent.write_exit_codes({0: -signal.SIGTERM, 1: -signal.SIGABRT})
    outcome = read_outcome(folder, TreeExit(exit_code=1), 2)
    assert outcome.cause is not None
    assert outcome.cause.out_of_step == out_of_step
    assert ("rank 1 is in all_reduce (train.py:42)" in outcome.cause.text) == out_of_step


def test_an_abort_while_a_rank_runs_its_own_code_is_not_out_of_step(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "run", {0: 60, 1: 61})
    _write_stacks(folder, ("all_reduce", 37), ("_load", 12))
    folder.agent.write_exit_codes({0: -signal.SIGTERM, 1: -signal.SIGABRT})
    outcome = read_outcome(folder, TreeExit(exit_code=1), 2)
    assert outcome.cause is not None
    assert not outcome.cause.out_of_step


def test_a_rank_that_reports_its_error_has_ended(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "run", {0: 60, 1: 60})
    _write_stacks(folder, ("all_reduce", 37))
    place = Path(verdict.__file__).with_name("workload_process.py")
    folder.stack_file(1).write_text(
        "Thread 0x7 (most recent call first):\n"
        f'  File "{traceback.__file__}", line 124 in print_exception\n'
        f'  File "{place}", line 225 in run_rank\n'
    )
    folder.agent.write_exit_codes({0: -signal.SIGABRT})
    outcome = read_outcome(folder, TreeExit(exit_code=1), 2)
    assert outcome.cause is not None
    assert "(train.py:37) after step 60; rank 1 has ended after step 60" in outcome.cause.text


def test_ranks_that_hang_in_one_place_are_not_out_of_step(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "run", {0: 60, 1: 60})
    _write_stacks(folder, ("all_reduce", 37), ("all_reduce", 37))
    outcome = read_outcome(folder, TreeExit(hung=(0, 60)), 2)
    assert outcome.cause is not None
    assert not outcome.cause.out_of_step


def test_a_rank_that_hangs_in_its_own_code_is_not_out_of_step(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "run", {0: 60, 1: 60})
    _write_stacks(folder, ("all_reduce", 37), ("_load", 12))
    outcome = read_outcome(folder, TreeExit(hung=(1, 60)), 2)
    assert outcome.cause is not None
    assert not outcome.cause.out_of_step


def test_a_rank_that_ended_while_another_needed_it(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "run", {0: 59, 1: 59}, finished=[1])
    lost = RankFailure(
        rank=0, status="crashed", text="gone", collateral=True, location="train.py:29"
    )
    folder.reports.write_failure(lost)
    outcome = read_outcome(folder, TreeExit(exit_code=1), 2)
    assert outcome.cause is not None
    assert "rank 0 is in train.py:29 after step 59; rank 1 has ended" in outcome.cause.text


def test_an_error_of_a_rank_is_not_explained_by_ranks_that_ended(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "run", {0: 59, 1: 59}, finished=[1])
    folder.reports.write_failure(dataclasses.replace(_failure(0), location="train.py:29"))
    outcome = read_outcome(folder, TreeExit(exit_code=1), 2)
    assert outcome.cause is not None
    assert not outcome.cause.out_of_step
