"""What was measured so far, as a whole."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from explaining import experiment_design
from made import machine, plan
from nfold.core.measurement import Caveat, FailureCause, Measurement, RankSamples, Window
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.explain.advice.caveats import collect_caveats
from nfold.explain.design import Trial
from nfold.explain.metrics import compute_metrics, contended_core_fraction
from nfold.explain.trials import TrialResults
from nfold.launch.verdict import HANG_TIMEOUT_HINT

HOST = machine(gpus=2)
STEP_S = 0.02
REAL = Trial(plan=plan(HOST, devices=2, batch=16))
RESIDENT = Trial(plan=REAL.plan, variant=Variant(input="resident"))


def _run(trial: Trial, *ahead_s: float | None) -> Measurement:
    """Each rank's host is so far ahead when its windows end."""
    ranks = tuple(
        RankSamples(
            rank=rank,
            device="gpu",
            windows=tuple(
                Window(start_s=0, seconds=10 * STEP_S, steps=10, samples=80, queue_drain_s=one)
                for _ in range(4)
            ),
        )
        for rank, one in enumerate(ahead_s)
    )
    return Measurement(
        id="m", workload=Workload(name="digits"), plan=trial.plan, machine=HOST, ranks=ranks,
        status="ok",
    )  # fmt: skip


def _in_turns(trial: Trial, *step_ms: float) -> Measurement:
    """In a process tree with others, whose steps took so long in its windows."""
    run = _run(trial, 0.01, 0.01)
    ranks = []
    for rank in run.ranks:
        timed = zip(rank.windows, step_ms, strict=True)
        windows = (dataclasses.replace(one, seconds=one.steps * ms / 1e3) for one, ms in timed)
        ranks.append(dataclasses.replace(rank, windows=tuple(windows)))
    return dataclasses.replace(run, ranks=tuple(ranks), folder="one tree")


def _width_ms(*runs: tuple[Trial, Measurement]) -> float:
    measured = TrialResults()
    for trial, run in runs:
        measured.add(trial, 0, run)
    found = measured.fit(200).interval(lambda view: view.step(RESIDENT))
    assert found.low is not None
    assert found.high is not None
    return found.high - found.low


def test_of_two_ranks_the_one_counts_whose_host_is_less_ahead() -> None:
    assert compute_metrics(_run(REAL, 0.2, 0.01), ranks_synchronize=True)["ahead"] == pytest.approx(
        10
    )
    assert "ahead" not in compute_metrics(_run(REAL, 0.2, None), ranks_synchronize=True)


@pytest.mark.parametrize("other", [(0.2, 0.01), (0.2, None), (0.01, 0.01)])
def test_a_trial_scatters_less_where_every_host_is_ahead_in_every_run(
    other: tuple[float | None, ...],
) -> None:
    ahead = (REAL, _run(REAL, 0.2, 0.3))
    narrow = _width_ms(ahead, (RESIDENT, _run(RESIDENT, 0.1, 0.02)))
    wide = _width_ms(ahead, (RESIDENT, _run(RESIDENT, *other)))
    assert narrow < 0.4 * wide


def test_a_run_of_fewer_trials_than_any_takes_what_the_others_timed_less() -> None:
    """Three trials took 15 s together, 0.8 s of it timed of each: one alone takes 13.4 at most."""
    measured = TrialResults()
    trials = [Trial(plan=REAL.plan, variant=Variant(threads=n)) for n in (1, 2, 3)]
    for trial in trials:
        run = dataclasses.replace(_run(trial, None), folder="one tree", wall_seconds=15.0)
        measured.add(trial, 0, run)
    assert measured.expected_seconds([REAL]) == pytest.approx(15.0 - 2 * 4 * 10 * STEP_S)
    assert measured.expected_seconds([REAL, RESIDENT, *trials[:1]]) == 15.0
    assert measured.expected_seconds(trials) == 15.0


@pytest.mark.parametrize(
    ("devices", "others", "taken"), [(2, 0.9, 0.45), (1, 0.9, 0.0), (1, 1.5, 0.25), (2, 0.0, 0.0)]
)
def test_what_other_processes_took_is_in_the_interval(
    devices: int, others: float, taken: float
) -> None:
    """On two cores: a run on one of them loses nothing to what leaves it its own."""
    host = machine(cores=2)
    asked = plan(host, devices=devices, batch=16, device="cpu", cores_per_device=1)
    busy = Caveat(kind="busy_host", text=f"other processes used {others} cores", value=others)
    trial = Trial(plan=asked)
    run = dataclasses.replace(_run(trial, *[None] * devices), machine=host)
    disturbed = dataclasses.replace(run, warnings=(busy,) if others else ())
    assert contended_core_fraction(disturbed) == pytest.approx(taken)
    calm, wide = (_interval(trial, one) for one in (run, disturbed))
    assert (wide > 5 * calm) == (taken > 0)


def _interval(trial: Trial, run: Measurement) -> float:
    measured = TrialResults()
    measured.add(trial, 0, run)
    found = measured.fit(200).interval(lambda view: view.step(trial))
    assert found.low is not None
    assert found.high is not None
    return found.high - found.low


@pytest.mark.parametrize(
    ("status", "signum", "hint"),
    [
        ("hung", None, f"; {HANG_TIMEOUT_HINT}"),
        ("interrupted", None, "; next: a larger --budget"),
        ("interrupted", 2, ""),
        ("crashed", None, ""),
    ],
)
def test_the_reason_of_a_run_without_a_result_says_what_to_try(
    status: Any, signum: int | None, hint: str
) -> None:
    measured, cause = TrialResults(), FailureCause(text="no step after 10", signal=signum)
    measured.add(REAL, 0, dataclasses.replace(_run(REAL), status=status, cause=cause))
    assert measured.missing_reason([REAL]) == f"{status}: no step after 10{hint}"


@pytest.mark.parametrize(("longest_ms", "told"), [(21.0, False), (24.0, True)])
def test_a_host_that_is_now_faster_and_now_slower_casts_doubt(
    longest_ms: float, *, told: bool
) -> None:
    measured = TrialResults()
    for trial in (REAL, RESIDENT):
        measured.add(trial, 0, _in_turns(trial, 20.0, 20.0, 20.0, longest_ms))
    found = {
        doubt.kind: doubt
        for doubt in collect_caveats(experiment_design(), measured, measured.fit(20))
    }
    assert ("unsteady" in found) == told
    if told:
        assert "20 to 24 ms" in found["unsteady"].text
        assert found["unsteady"].value == pytest.approx(1.2)


@pytest.mark.parametrize(("growth", "told"), [(1.02, False), (1.2, True)])
def test_batches_that_grow_from_turn_to_turn_cast_doubt(growth: float, *, told: bool) -> None:
    measured = TrialResults()
    for trial, times in ((REAL, growth), (RESIDENT, 1.0)):
        measured.add(trial, 0, _in_turns(trial, *(20.0 * times**at for at in range(4))))
    found = {
        doubt.kind: doubt
        for doubt in collect_caveats(experiment_design(), measured, measured.fit(20))
    }
    assert ("changing_batches" in found) == told
    if told:
        assert "20 to 34.6 ms" in found["changing_batches"].text
