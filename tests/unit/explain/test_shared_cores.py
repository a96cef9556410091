"""Ranks that are bound to fewer cores than there are ranks: the headline and the first change."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from explaining import HOST, Memory, script_runner, target
from nfold.core.measurement import Measurement, RankSamples
from nfold.core.plan import Plan
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile, SourceLocation
from nfold.engines.simulated import Scenario
from nfold.explain.attribution import build_budget
from nfold.explain.causes.host_processes import THREADS
from nfold.explain.causes.input_pipeline import INPUT
from nfold.explain.design import ExperimentDesign
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.result.budget import Budget
from nfold.explain.result.view import build_view
from nfold.explain.script_probe import probe_script
from nfold.explain.time_budget import TimeBudget

DEVICES = Plan(framework="simulated", device="cpu", devices=2, cores_per_device=1, steps=1)
RANK = ScriptProfile(
    steps=30,
    loader=DataLoaderProfile(
        batch_size=100, batches_per_epoch=20, dataset_size=2000, sampler="DistributedSampler"
    ),
    samples_per_step=100.0,
    device="cpu",
    world_size=2,
    process_group=True,
    parallel="ddp",
    backend="gloo",
    source_locations={"affinity": (SourceLocation(line="train.py:3"),)},
)


def _explained(cores: tuple[int, ...], **costs: Any) -> tuple[ExperimentDesign, Budget]:
    """Explain two ranks on the simulated framework; rank K is bound to ``cores[K]``."""
    scenario = Scenario(compute_ms_per_sample=0.1, samples_per_epoch=2000, **costs)
    runner = target(scenario, Memory(), script_runner(scenario))
    experiment = Experiment(runner, TimeBudget(1000.0), ExperimentEvents())
    ranks = tuple(dataclasses.replace(RANK, core_ids=(core,)) for core in cores)
    design = probe_script(experiment, DEVICES, None, HOST, lambda _: ranks)
    return design, build_budget("train.py", experiment.run(design), experiment.results)


@pytest.mark.parametrize(
    ("costs", "what"),
    [
        ({"load_ms_per_sample": 0.8}, ": waiting for the data loader takes "),
        ({"contention_ms": 9.0}, ": contention takes "),
        ({"transfer_ms": 30.0}, "."),
        ({}, "."),
    ],
)
def test_a_shared_core_is_the_headline_and_the_first_change(
    costs: dict[str, float], what: str
) -> None:
    design, budget = _explained((0, 0), **costs)
    assert THREADS.observed_in_probe(design)
    assert not INPUT.fixes(design)
    assert not budget.devices_cannot_help
    view = build_view(budget)
    assert view.tone == "costly"
    assert view.headline.startswith(f"All ranks and their loader workers share 1 core{what}")
    assert view.change is not None
    assert view.change.location == "train.py:3"
    assert "restore os.sched_setaffinity()" in view.change.code
    assert not [text for text in view.notices if "bound to" in text]


@pytest.mark.parametrize(("factor", "told_ms"), [(0.98, 2.74), (1.05, 3.65), (1.5, 3.0)])
def test_a_host_that_is_slower_while_independent_ranks_run_is_no_contention(
    factor: float, told_ms: float
) -> None:
    """Ranks without exchange do the same work: the step of one takes 10 ms, beside another 13 ms."""
    scenario = Scenario(compute_ms_per_sample=0.1, samples_per_epoch=2000, contention_ms=3.0)
    usual = script_runner(scenario)

    def run(*given: Any, **options: Any) -> Measurement:
        found: Measurement = usual(*given, **options)
        if not found.variant or not found.variant.independent:
            return found
        return dataclasses.replace(
            found, ranks=tuple(_slower(rank, factor) for rank in found.ranks)
        )

    experiment = Experiment(target(scenario, Memory(), run), TimeBudget(1000.0), ExperimentEvents())
    ranks = tuple(dataclasses.replace(RANK, core_ids=(core,)) for core in (0, 1))
    design = probe_script(experiment, DEVICES, None, HOST, lambda _: ranks)
    budget = build_budget("train.py", experiment.run(design), experiment.results)
    lost_ms = {row.cause: row.lost_ms.value for row in budget.rows}
    assert lost_ms["threads"] == pytest.approx(told_ms, abs=0.05)
    assert lost_ms["synchronization"] == pytest.approx(3.0 - told_ms, abs=0.05)


def _slower(rank: RankSamples, factor: float) -> RankSamples:
    windows = (dataclasses.replace(one, seconds=factor * one.seconds) for one in rank.windows)
    return dataclasses.replace(
        rank, windows=tuple(windows), step_ms=tuple(factor * one for one in rank.step_ms)
    )


def test_ranks_with_a_core_each_share_none() -> None:
    design, budget = _explained((0, 1), load_ms_per_sample=0.8)
    assert not THREADS.observed_in_probe(design)
    view = build_view(budget)
    assert "share" not in view.headline
    assert view.change is not None
    assert "sched_setaffinity" not in view.change.code + view.change.note
