"""From what the processes left behind to one status and its root cause. Pure functions."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import cast

from nfold.measurement import FailureCause, Status
from nfold.run.handoff import RankFailure
from nfold.run.supervise import TreeExit

AGENT_EXIT_CODES = (-signal.SIGTERM,)
"""Exit codes that torchelastic causes itself when it stops the ranks beside a failed one."""
HANG_TIMEOUT_HINT = "next: where that was work of its own, --hang-timeout SECONDS"
"""What to do about a rank that hung."""


def determine_status(
    ending: TreeExit,
    failures: Sequence[RankFailure],
    exits: Mapping[int, int],
    measured: int,
    processes: int,
) -> tuple[Status, FailureCause | None]:
    """The status of a run and why.

    ``failures`` come earliest first; ``exits`` are torchelastic's exit codes by rank;
    ``measured`` counts the ranks that left their samples. A rank that was killed, or that
    failed by itself, comes before those that failed because it was gone.
    """
    if ending.stop_signal is not None:
        name = signal.Signals(ending.stop_signal).name
        return "interrupted", FailureCause(text=f"nfold got {name}", signal=ending.stop_signal)
    if ending.timed_out is not None:
        seconds, step = ending.timed_out
        text = f"the {seconds:.0f} s that it was given were over after step {step}"
        return "interrupted", FailureCause(
            text=text, step=step, stalled_s=ending.seconds_since_step
        )
    if ending.hung is not None:
        rank, step = ending.hung
        text = f"rank {rank} made no progress after step {step}"
        return "hung", FailureCause(
            text=text, rank=rank, step=step, stalled_s=ending.seconds_since_step
        )
    own = [failure for failure in failures if not failure.collateral]
    if own:
        return _failed(own[0])
    killed = _killed(ending, exits, processes)
    if killed is not None:
        return "killed", killed
    if _exits_without_failure(failures, exits):
        return "crashed", _exit_code_cause(ending, _exits_without_failure(failures, exits))
    if failures:
        return _failed(failures[0])
    if ending.exit_code == 0 and measured == processes:
        return "ok", None
    return "crashed", _exit_code_cause(ending, exits)


def _exits_without_failure(
    failures: Sequence[RankFailure], exits: Mapping[int, int]
) -> dict[int, int]:
    """The ranks that ended with an exit code of their own and left no word."""
    spoke = {failure.rank for failure in failures}
    return {rank: code for rank, code in exits.items() if code > 0 and rank not in spoke}


def _failed(failure: RankFailure) -> tuple[Status, FailureCause]:
    cause = FailureCause(text=failure.text, rank=failure.rank, step=failure.step)
    return cast(Status, failure.status), cause


def _killed(ending: TreeExit, exits: Mapping[int, int], processes: int) -> FailureCause | None:
    """The first rank that a signal ended, or the agent itself."""
    if processes == 1 and ending.exit_code is not None and ending.exit_code < 0:
        return _signalled("rank 0", -ending.exit_code, rank=0)
    for rank, code in sorted(exits.items()):
        if code < 0 and code not in AGENT_EXIT_CODES:
            return _signalled(f"rank {rank}", -code, rank=rank)
    if ending.exit_code is not None and ending.exit_code < 0:
        return _signalled("the agent", -ending.exit_code, rank=None)
    for rank, code in sorted(exits.items()):
        if code < 0 and all(other == code for other in exits.values()):
            return _signalled(f"rank {rank}", -code, rank=rank)
    return None


def _signalled(who: str, signum: int, rank: int | None) -> FailureCause:
    name = signal.Signals(signum).name
    hint = "; the kernel's out-of-memory killer does this too" if signum == signal.SIGKILL else ""
    return FailureCause(text=f"{who} was ended by {name}{hint}", rank=rank, signal=signum)


def _exit_code_cause(ending: TreeExit, exits: Mapping[int, int]) -> FailureCause:
    failed = {rank: code for rank, code in exits.items() if code != 0}
    rank = min(failed, default=None)
    where = "the agent" if rank is None else f"rank {rank}"
    code = ending.exit_code if rank is None else failed[rank]
    return FailureCause(text=f"{where} exited with {code} and left no word; see its log", rank=rank)
