"""Contrasts between two trials, and what a cause derives from them."""

from __future__ import annotations

import dataclasses

import pytest

from explaining import experiment_design
from nfold.explain.causes.cause import Cause
from nfold.explain.causes.cost_model import Contrast, one_device_trials_and_step
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.estimate.bootstrap import MetricView

DESIGN = experiment_design(input="loader")
ACTUAL, SINGLE = DESIGN.actual(), DESIGN.one_device("real")
REPLAYED, REPLAYED_SINGLE = DESIGN.actual("replayed"), DESIGN.one_device("replayed")
REAL = Contrast(ACTUAL, SINGLE)
CONTRAST = Contrast(REPLAYED, REPLAYED_SINGLE, "devices")


def view_of(steps: dict[Trial, float], *, slowest: float = 0.0) -> MetricView:
    values = {(trial, "step"): ms for trial, ms in steps.items()}
    return MetricView({**values, (ACTUAL, "slowest"): slowest})


def test_a_contrast_is_the_difference_of_the_metrics_of_both_trials() -> None:
    view = view_of({ACTUAL: 12.0, SINGLE: 10.0}, slowest=13.0)
    assert REAL.cost_ms(view) == 2.0
    slowest = dataclasses.replace(REAL, metric=MetricView.slowest_rank_step)
    assert slowest.cost_ms(view) == 3.0


def test_the_part_of_another_cause_is_subtracted_and_its_trials_are_needed() -> None:
    both = dataclasses.replace(REAL, less=CONTRAST)
    view = view_of({ACTUAL: 12.0, SINGLE: 7.0, REPLAYED: 11.0, REPLAYED_SINGLE: 9.0})
    assert both.cost_ms(view) == 3.0
    assert both.trials == (ACTUAL, SINGLE, REPLAYED, REPLAYED_SINGLE)
    assert dataclasses.replace(REAL, base_first=True).trials == (SINGLE, ACTUAL)


@pytest.mark.parametrize(
    ("real_ms", "exposed_ms"), [(12.0, 2.0), (11.0, 1.0), (15.0, 2.0), (9.0, 0.0)]
)
def test_a_cost_that_the_real_input_hides_does_not_count(real_ms: float, exposed_ms: float) -> None:
    contrast = dataclasses.replace(CONTRAST, real=REAL)
    view = view_of({ACTUAL: real_ms, SINGLE: 10.0, REPLAYED: 8.0, REPLAYED_SINGLE: 6.0})
    assert contrast.exposed_ms(DESIGN, view) == exposed_ms


class TwoContrasts(Cause):
    """Both contrasts, the first without a name."""

    def contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        return (dataclasses.replace(CONTRAST, name=""), Contrast(ACTUAL, REPLAYED, "input"))

    def one_device_contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        return (Contrast(SINGLE, REPLAYED_SINGLE),)


COSTS = TwoContrasts("two").costs(DESIGN)


def test_trials_costs_and_totals_of_a_cause_follow_from_its_contrasts() -> None:
    assert COSTS.trials == (REPLAYED, REPLAYED_SINGLE, ACTUAL)
    assert one_device_trials_and_step(COSTS) == (SINGLE, REPLAYED_SINGLE)
    view = view_of({ACTUAL: 12.0, SINGLE: 10.0, REPLAYED: 9.0, REPLAYED_SINGLE: 8.0})
    assert COSTS.lost_ms(view) == 4.0
    assert COSTS.components(view) == {"input": 3.0}
    assert COSTS.one_device_ms(view) == 2.0
    assert COSTS.total_ms(view) == 6.0


def test_a_cause_costs_what_its_measured_contrasts_show() -> None:
    view = view_of({ACTUAL: 12.0, REPLAYED: 9.0})
    assert COSTS.evidence(view) == (ACTUAL, REPLAYED)
    assert COSTS.lost_ms(view) == 3.0
    assert not COSTS.evidence(view_of({ACTUAL: 12.0}))
