"""Whether a slow device has a slow clock."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from explaining import experiment_design, runner, target
from nfold.core.measurement import Measurement, RankSamples
from nfold.engines.simulated import Scenario
from nfold.explain.attribution import build_budget
from nfold.explain.causes.work_division import IMBALANCE
from nfold.explain.design import no_allreduce
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.metrics import GpuClockRate, slow_clock_advice
from nfold.explain.time_budget import TimeBudget as Seconds

SCRIPT = Scenario(
    compute_ms_per_sample=0.1, samples_per_epoch=2000, straggler_ms=1.0, straggler_rank=1
)


def _fix(clocks: dict[int, tuple[float, str]], *, waiting: tuple[float, str] = (1980.0, "")) -> str:
    """What is told of a slow second device whose GPUs have such clocks while none waits."""
    usual = runner(SCRIPT)

    def with_clock(rank: RankSamples, device: int, free: bool) -> RankSamples:
        mhz, held = clocks.get(device, (None, "")) if free else waiting
        windows = [
            dataclasses.replace(w, clock_mhz=mhz, throttle_reason=held) for w in rank.windows
        ]
        return dataclasses.replace(rank, windows=tuple(windows))

    def run(*asked: Any, **more: Any) -> Measurement:
        done: Measurement = usual(*asked, **more)
        out = done.variant
        free = out is not None and (out.independent or out.exchange == "none")
        order = out.devices if out is not None and out.devices else range(len(done.ranks))
        ranks = [with_clock(r, k, free) for r, k in zip(done.ranks, order, strict=True)]
        return dataclasses.replace(done, ranks=tuple(ranks))

    made = target(SCRIPT, run=run)
    made = dataclasses.replace(made, switchable_fields=lambda *_: ())
    experiment = Experiment(made, Seconds(1000.0), ExperimentEvents())
    measured = experiment.run(experiment_design("weak", devices=4, batch=400))
    found = build_budget("digits", measured, experiment.results)
    return next(row.fix for row in found.rows if row.cause == "imbalance")


FAST = (1980.0, "")


def test_a_slow_clock_is_told_with_what_holds_it_back() -> None:
    slow = (1755.0, "at its power limit")
    assert _fix({0: FAST, 1: slow, 2: FAST, 3: FAST}) == (
        "device 1 is slow: its clock is 1,755 MHz (at its power limit), that of the others 1,980 MHz: "
        "check its cooling and its power limit, or exclude it"
    )


@pytest.mark.parametrize(
    ("clocks", "told"),
    [
        pytest.param({0: FAST, 1: FAST, 2: FAST, 3: FAST}, "its clock is not", id="all alike"),
        pytest.param(
            {0: FAST, 1: (1965.0, ""), 2: FAST, 3: FAST}, "its clock is not", id="one step lower"
        ),
        pytest.param(
            {0: FAST, 1: (1755.0, ""), 2: FAST}, "check its clock", id="one not looked at"
        ),
    ],
)
def test_a_clock_that_does_not_explain_it_is_not_told(
    clocks: dict[int, tuple[float, str]], told: str
) -> None:
    """Nor does the clock count while devices wait for each other: then it is quick."""
    assert _fix(clocks, waiting=(1000.0, "")).startswith(f"device 1 is slow: {told}")


def test_half_of_what_is_missing_is_enough() -> None:
    known = (GpuClockRate(1980.0), GpuClockRate(1900.0), GpuClockRate(1980.0))
    assert slow_clock_advice(known, 1, 1.08) is not None
    assert slow_clock_advice(known, 1, 1.10) is None
    assert slow_clock_advice((), 1, 1.10) is None


def test_a_slow_rank_that_nobody_moved_yet_is_told_by_its_clock() -> None:
    asked = experiment_design("weak", devices=2)
    trial = no_allreduce(asked, asked.cheapest_input)
    view = MetricView({(trial, "rank 0"): 10.0, (trial, "rank 1"): 11.0})
    both = "rank 1 is slow: compare its device and its share of the data"
    assert IMBALANCE.fix(asked, view) == both
    known = dataclasses.replace(asked, clock_rates=(GpuClockRate(1980.0), GpuClockRate(1800.0)))
    assert IMBALANCE.fix(known, view).startswith("rank 1 is slow: its clock is 1,800 MHz,")
