"""Two runs of a script on two CPU devices that alternate."""

from __future__ import annotations

import math
import time
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from nfold.core.interleave import SLICES
from nfold.core.measurement import Measurement
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.explain.design import Trial
from nfold.instrument.hooks.model_hooks import FIRST_STEPS
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import RunOptions, StartCallback
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.tune.runs.alternating_runs import CannotAlternateError, log_ratio, run_alternating
from nfold.tune.runs.losses import sample_hash

pytestmark = pytest.mark.integration
SCRIPT = str(Path(__file__).parent / "scripts" / "somebodys_ddp.py")
STEPS = 18


@pytest.fixture
def plan() -> Plan:
    if inspect_machine().cores < 2:
        pytest.skip("a CPU device needs a core of its own")
    return Plan(
        device="cpu", devices=2, cores_per_device=1, strategy="ddp", steps=STEPS, warmup_steps=4
    )


def _run(
    plan: Plan, results: Path, number: int, on_start: StartCallback, *script: str
) -> Measurement:
    options = RunOptions(results=results, alternates=True, on_start=on_start)
    workload = Workload.from_script(*(script or (SCRIPT, "usual")))
    return run(workload, plan, machine=inspect_machine(), repeat=number, options=options)


def test_one_run_trains_while_the_other_waits(plan: Plan, tmp_path: Path) -> None:
    pair = run_alternating(
        lambda on_start: _run(plan, tmp_path, 1, on_start),
        lambda on_start: _run(plan, tmp_path, 2, on_start),
    )
    for one in pair:
        assert one.status == "ok", one.cause
        assert {tuple(dict.fromkeys(rank.slots)) for rank in one.ranks} == {tuple(range(SLICES))}
        assert {len(rank.step_ms) for rank in one.ranks} == {STEPS}
    windows = sorted(
        (window.start_s, window.start_s + window.seconds, number)
        for number, one in enumerate(pair)
        for window in one.ranks[0].windows
    )
    assert [number for number, _ in groupby(number for _, _, number in windows)] == [0, 1] * SLICES
    assert all(before[1] <= after[0] for before, after in pairwise(windows))
    assert math.isfinite(log_ratio(*((Trial(plan=plan), one) for one in pair)))


def test_a_run_waits_before_its_warm_up(plan: Plan, tmp_path: Path) -> None:
    folders: list[Path] = []
    steps: list[int] = []
    deadline = time.monotonic() + 60  # s

    def watch(_: StartCallback) -> Measurement:
        while not folders or HandoffFolder(folders[0]).slices.read_done() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        beats = HandoffFolder(folders[0]).reports.read_heartbeats()
        steps.extend(beat.step for beat in beats.values())
        raise InterruptedError

    def waiting(on_start: StartCallback) -> Measurement:
        def note(folder: Path) -> None:
            folders.append(folder)
            on_start(folder)

        return _run(plan, tmp_path, 1, note)

    with pytest.raises(InterruptedError):
        run_alternating(waiting, watch)
    assert steps == [FIRST_STEPS, FIRST_STEPS]


@pytest.mark.slow(parts=8)
def test_a_run_goes_on_without_the_other(plan: Plan, tmp_path: Path) -> None:
    fails = tmp_path / "fails.py"
    fails.write_text("raise ValueError('at once')\n")
    failed, alone = run_alternating(
        lambda on_start: _run(plan, tmp_path, 1, on_start, str(fails)),
        lambda on_start: _run(plan, tmp_path, 2, on_start),
    )
    assert failed.status == "crashed"
    assert alone.status == "ok", alone.cause
    assert {len(rank.step_ms) for rank in alone.ranks} == {STEPS}
    with pytest.raises(CannotAlternateError, match=f"0 of {SLICES} slices"):
        log_ratio((Trial(plan=plan), failed), (Trial(plan=plan), alone))


def test_workers_of_a_run_that_waits_load_nothing(plan: Plan, tmp_path: Path) -> None:
    """A long queue, filled while the run waits, would make every step of a slice a fast one."""
    one_worker = plan.edit(devices=1, strategy="single", steps=60, workers=1)
    plans = one_worker.edit(workers=0), one_worker
    script = str(Path(SCRIPT).with_name("prefetched.py"))
    pair = run_alternating(
        lambda on_start: _run(plans[0], tmp_path, 1, on_start, script, "2"),
        lambda on_start: _run(plans[1], tmp_path, 2, on_start, script, "64"),
    )
    for one in pair:
        assert one.status == "ok", one.cause
    ratio = log_ratio(*((Trial(plan=own), one) for own, one in zip(plans, pair, strict=True)))
    assert abs(ratio) < math.log(1.5)  # 5 without it
    # More steps are discarded with more workers, but the warm-up has the same samples.
    assert sample_hash(pair[0]) == sample_hash(pair[1]) is not None
