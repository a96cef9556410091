"""Time may be over after any run: whatever was measured by then is explained."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from explaining import experiment_design, target
from nfold.core.measurement import FetchStats
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile, SourceLocation
from nfold.engines.simulated import Scenario
from nfold.explain import planner
from nfold.explain.attribution import build_budget
from nfold.explain.design import ExperimentDesign, Trial, with_expandable_segments
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import TrialResults

COSTS = Scenario(
    compute_ms_per_sample=0.1,
    exchange_ms=3.0,
    load_ms_per_sample=0.2,
    host_ms=2.0,
    host_cores=4,
    samples_per_epoch=2000,
)
LOADER = DataLoaderProfile(
    batch_size=100, batches_per_epoch=20, dataset_size=2000, num_workers=2, created_at="train.py:7"
)
ONE = ScriptProfile(
    steps=30,
    loader=LOADER,
    samples_per_step=100.0,
    device="cuda:0",
    host_syncs=3.0,
    alloc_retries=1.0,
    threads=99,
    fetches=FetchStats(batches=10, seconds=1.0, waited_s=0.3),
    source_locations={"host_sync": (SourceLocation(line="train.py:9"),)},
)
RANKS = dataclasses.replace(
    ONE,
    world_size=2,
    process_group=True,
    parallel="ddp",
    backend="nccl",
    broadcast_buffers=True,
    buffers=3,
    gradient_exchanges=2.0,
    accumulation=2,
)
DESIGNS: dict[str, dict[str, Any]] = {
    "workload": {"workers": 4, "augment": "cpu"},
    "one process": {"strategy": "dp", "workers": 4},
    "ranks": {"seen": RANKS, "scaling": "weak", "accumulate": 2, "batch_norm": "synchronised"},
    "script under nn.DataParallel": {"seen": dataclasses.replace(ONE, parallel="dp")},
    "plain script": {"seen": ONE},
}


def made(seen: ScriptProfile | None = None, **changes: Any) -> ExperimentDesign:
    if seen is None:
        return experiment_design(**changes)
    said = {"strategy": "ddp" if seen.process_group else "dp", "workers": 2, "input": "loader"}
    asked = experiment_design(**{**said, "step": "eager", **changes})
    return dataclasses.replace(asked, profile=seen)


STARVED = dataclasses.replace(COSTS, load_ms_per_sample=2.0, repeated_ms=2.0, buffers_ms=1.0)
"""So much that all contrasts are measured with the real input as well."""


def whole(asked: ExperimentDesign, costs: Scenario) -> tuple[ExperimentDesign, TrialResults]:
    """All that an explanation with much time measures."""
    experiment = Experiment(target(costs), TimeBudget(1000.0), ExperimentEvents())
    return experiment.run(asked), experiment.results


def some(measured: TrialResults, needed: tuple[Trial, ...], draws: random.Random) -> TrialResults:
    """What is needed, and any of the others, in any rounds."""
    part = draws.random()
    kept = {
        trial: {n: m for n, m in runs.items() if trial in needed or draws.random() < part}
        for trial, runs in measured.runs.items()
    }
    return TrialResults(
        {trial: runs for trial, runs in kept.items() if runs}, dict(measured.reasons)
    )


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("costs", [COSTS, STARVED], ids=["fed", "starved"])
@pytest.mark.parametrize("what", list(DESIGNS))
def test_any_part_of_the_runs_has_a_budget_that_adds_up(what: str, costs: Scenario) -> None:
    asked, measured = whole(made(**DESIGNS[what]), costs)
    draws = random.Random(what)
    assert len(measured.runs) > 5
    for _ in range(20):
        known = some(measured, (asked.actual(), asked.baseline), draws)
        found = build_budget("train.py", asked, known, resamples=5)
        rows = sum(row.lost_ms.value for row in found.rows)
        missing = found.n_devices.step_ms.value - found.ideal_ms.value
        if not found.training_errors:
            assert rows + found.not_attributed_ms.value == pytest.approx(missing, abs=1e-6)
        assert all(row.fix for row in (*found.rows, *found.one_device_rows))
        assert all(isinstance(trial, Trial) for trial in planner.follow_ups(asked, known))


@pytest.mark.parametrize("retries", [0.0, 1.0])
def test_what_a_first_look_has_seen_is_measured_first(retries: float) -> None:
    """An allocator that tries again is worth more than what any script may lose."""
    seen = dataclasses.replace(RANKS, alloc_retries=retries, gradient_exchanges=1.0)
    asked = made(seen, scaling="weak", accumulate=2)
    wanted = list(dict.fromkeys(planner.required(asked)))
    tried = {
        asked.actual(),
        asked.one_device("real"),
        with_expandable_segments(asked, asked.actual()),
        with_expandable_segments(asked, asked.baseline),
    }
    assert (set(wanted[: len(tried)]) == tried) == bool(retries)
