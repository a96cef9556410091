"""Losses of the first steps, by which two runs are compared."""

from __future__ import annotations

import math

import pytest

from nfold.interventions.intervention import Numerics
from nfold.tune.runs.losses import LossReference

LOSSES = tuple(2.0 / step for step in range(1, 21))
NOISY = tuple(loss * (1.2 if step % 2 else 0.8) for step, loss in enumerate(LOSSES))


def scaled(factor: float) -> tuple[float, ...]:
    return tuple(factor * loss for loss in LOSSES)


@pytest.mark.parametrize(
    ("factor", "numerics", "differs"),
    [
        (1.00001, "same", False),
        (1.001, "same", True),
        (1.001, "rounding", False),
        (1.05, "rounding", True),
        (1.5, "training", False),
    ],
)
def test_the_class_of_a_remedy_limits_the_difference(
    factor: float, numerics: Numerics, differs: bool
) -> None:
    reference = LossReference((LOSSES, LOSSES))
    assert bool(reference.objection(scaled(factor), numerics)) == differs


def test_two_runs_of_the_original_may_differ_as_much() -> None:
    reference = LossReference((LOSSES, scaled(1.002)))
    assert reference.objection(scaled(1.005), "same") is None
    assert reference.objection(scaled(1.02), "same") is not None


def test_losses_that_do_not_repeat_are_compared_by_their_means() -> None:
    reference = LossReference((LOSSES, NOISY))
    assert not reference.is_repeatable
    assert reference.objection(tuple(reversed(NOISY)), "same") is None
    assert "mean loss" in (reference.objection(scaled(10.0), "same") or "")


@pytest.mark.parametrize("numerics", ["same", "rounding", "training"])
def test_a_loss_that_is_no_number_is_never_allowed(numerics: Numerics) -> None:
    reference = LossReference((LOSSES,))
    assert "step 3" in (reference.objection((2.0, 1.0, math.nan), numerics) or "")


def test_without_losses_there_is_nothing_to_object() -> None:
    assert LossReference(()).objection(LOSSES, "same") is None
    assert LossReference((LOSSES,)).objection((), "same") is None
