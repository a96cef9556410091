"""A script that fails with smaller batches is explained with those that it has."""

from __future__ import annotations

from typing import Any

import pytest

from explaining import HOST, SECONDS, Memory, failed, script_runner, target
from nfold.core.measurement import Measurement
from nfold.core.plan import Plan
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile
from nfold.core.variant import Variant
from nfold.engines.simulated import Scenario
from nfold.explain.attribution import build_budget
from nfold.explain.design import ExperimentDesign, Scaling, Trial
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.planner import with_original_batch
from nfold.explain.script_probe import probe_script
from nfold.explain.time_budget import TimeBudget

PLACE = Plan(framework="simulated", device="cuda", devices=2, cores_per_device=8, steps=1)
SEEN = ScriptProfile(
    steps=30,
    loader=DataLoaderProfile(
        batch_size=100, batches_per_epoch=20, dataset_size=2000, created_at="train.py:7"
    ),
    samples_per_step=100.0,
    device="cuda:0",
)
SCRIPT = Scenario(compute_ms_per_sample=0.1, samples_per_epoch=2000)


def explaining(least: int, crashed: list[Plan]) -> Experiment:
    """Of a script that crashes in every process that gets fewer samples than ``least``."""
    usual = script_runner(SCRIPT)

    def run(
        workload: Any, asked: Plan, ablation: Variant | None = None, **more: Any
    ) -> Measurement:
        processes = 1 if asked.strategy == "dp" else asked.devices or 1
        if asked.batch is not None and asked.batch // processes < least:
            crashed.append(asked)
            return failed(Trial(plan=asked, variant=ablation or Variant()), "ValueError: 50")
        found: Measurement = usual(workload, asked, ablation, **more)
        return found

    return Experiment(target(SCRIPT, Memory(), run), TimeBudget(SECONDS), ExperimentEvents())


def measured(
    least: int, scaling: Scaling | None = None, crashed: list[Plan] | None = None
) -> tuple[Experiment, ExperimentDesign]:
    experiment = explaining(least, [] if crashed is None else crashed)
    asked = probe_script(experiment, PLACE, scaling, HOST, lambda _: (SEEN,))
    assert (asked.scaling, asked.plan.batch) == ("strong", 100)
    return experiment, experiment.run(asked)


def test_each_device_has_one_of_its_own_and_why_is_told() -> None:
    experiment, design = measured(least=100)
    assert (design.scaling, design.plan.batch, design.baseline.plan.batch) == ("weak", 200, 100)
    assert design.profile is not None
    assert not design.profile.accepts_batch_size
    assert design.profile.replay_hints.script_sets_batch_size
    found = build_budget("train.py", design, experiment.results)
    told = "With smaller batches it fails (ValueError: 50): a step below is 2 of the script's own."
    assert found.headline.endswith(told)
    assert not any("ValueError" in one for one in experiment.results.reasons.values())
    assert "single-process" in {row.cause for row in found.rows}


@pytest.mark.parametrize(("least", "scaling"), [(1, None), (100, "strong")])
def test_what_works_or_was_asked_for_is_kept(least: int, scaling: Scaling | None) -> None:
    _, design = measured(least, scaling)
    assert (design.scaling, design.plan.batch) == ("strong", 100)


def test_one_run_of_one_device_that_crashes_is_enough() -> None:
    crashed: list[Plan] = []
    _, design = measured(100, crashed=crashed)
    assert design.scaling == "weak"
    assert [(plan.devices, plan.batch) for plan in crashed] == [(1, 50)]


def test_so_is_one_in_which_several_were_to_take_turns() -> None:
    experiment = explaining(100, [])
    asked = probe_script(experiment, PLACE, None, HOST, lambda _: (SEEN,))
    trials = [asked.one_device("real"), asked.one_device("replayed")]
    experiment._record(trials, 0, [failed(trial, "ValueError: 50") for trial in trials])
    assert not experiment.results.reasons
    own = with_original_batch(asked, experiment.results, experiment._interleaved_failures)
    assert own is not None
    assert (own.scaling, own.plan.batch) == ("weak", 200)
    assert with_original_batch(asked, experiment.results, {}) is None
