"""An operation: one call after the other, nothing exchanged, nothing loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from explaining import SECONDS, experiment_design, target
from nfold.core.measurement import OperationPart
from nfold.core.variant import Variant
from nfold.engines.simulated import Scenario
from nfold.explain.attribution import build_budget
from nfold.explain.causes.cause import NOT_APPLICABLE_TO_OPERATIONS
from nfold.explain.design import ExperimentDesign, replicas
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.result.budget import Budget
from nfold.explain.time_budget import TimeBudget

COSTS: dict[str, Any] = {
    "compute_ms_per_sample": 0.1,
    "copy_ms_per_sample": 0.02,
    "contention_ms": 1.5,
    "host_ms": 2.0,
}


def _operation(**changes: Any) -> ExperimentDesign:
    return dataclasses.replace(experiment_design(**changes), is_operation=True)


def _explained(asked: ExperimentDesign) -> tuple[Experiment, Budget]:
    experiment = Experiment(target(Scenario(**COSTS)), TimeBudget(SECONDS), ExperimentEvents())
    return experiment, build_budget("conv2d", experiment.run(asked), experiment.results)


def test_only_its_copies_are_left_out() -> None:
    experiment, _ = _explained(_operation())
    left_out = {trial.variant for trial in experiment.results.runs}
    assert left_out == {Variant(), Variant(input="resident")}


def test_its_rows_are_what_does_not_shrink_what_is_shared_and_what_is_copied() -> None:
    _, found = _explained(_operation())
    costs = {row.cause: row.lost_ms.value for row in found.rows}
    assert costs == pytest.approx(
        {"launch-bound": 1.0, "threads": 1.5, "copies": 0.0, **_none(found)}, abs=0.01
    )
    assert found.not_attributed_ms.value == pytest.approx(0, abs=0.01)
    alone = {row.cause: row.lost_ms.value for row in found.one_device_rows}
    assert alone["copies"] == pytest.approx(2.0, abs=0.01)
    fix = next(row.fix for row in found.one_device_rows if row.cause == "copies")
    assert "--input" not in fix


def _none(found: Budget) -> dict[str, float]:
    named = ("launch-bound", "threads", "copies")
    return dict.fromkeys((row.cause for row in found.rows if row.cause not in named), 0.0)


def test_what_it_cannot_have_is_said_with_the_reason() -> None:
    _, found = _explained(_operation())
    told = dict(found.unmeasured)
    assert {
        cause: told[cause] for cause in NOT_APPLICABLE_TO_OPERATIONS
    } == NOT_APPLICABLE_TO_OPERATIONS


def test_cpu_devices_copy_nothing_and_everything_else_is_what_they_share() -> None:
    asked = _operation(device="cpu")
    assert asked.cheapest_input == "real"
    assert replicas(asked, asked.cheapest_input) == asked.actual()


@pytest.mark.parametrize(("their_ms", "told"), [(1.0, True), (1000.0, False)])
def test_another_library_that_is_faster_than_all_devices_is_told(
    their_ms: float, told: bool
) -> None:
    asked = _operation()
    experiment, _ = _explained(asked)
    measured = experiment.results
    runs = next(runs for trial, runs in measured.runs.items() if trial.plan.devices == 2)
    part = OperationPart(name="scipy", seconds=(their_ms / 1e3,), images=1, bytes=0, baseline=True)
    first = runs[0]
    ranks = (dataclasses.replace(first.ranks[0], parts=(part,)), *first.ranks[1:])
    runs[0] = dataclasses.replace(first, ranks=ranks)
    full = next(trial for trial in measured.runs if trial.plan.devices == 2 and not trial.variant)
    found = build_budget("conv2d", dataclasses.replace(asked, plan=full.plan), measured)
    texts = {doubt.kind: doubt.text for doubt in found.caveats}
    assert ("overtaken" in texts) == told
    assert not told or "scipy takes 1 ms" in texts["overtaken"]
