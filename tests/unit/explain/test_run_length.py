"""How long runs are."""

from __future__ import annotations

import dataclasses

import pytest

from explaining import experiment_design
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile, TraceSummary
from nfold.explain.planner import interleaved_seconds, round_up, with_run_length


@pytest.mark.parametrize(
    ("steps", "found"), [(0.2, 1), (3, 3), (11, 15), (200, 200), (201, 300), (701, 1000)]
)
def test_lengths_are_round(steps: float, found: int) -> None:
    assert round_up(steps) == found


@pytest.mark.parametrize(
    ("step_s", "steps", "warmup"),
    [(0.012, 200, 500), (0.1, 20, 50), (0.3, 20, 20), (0.5, 15, 10), (1, 7, 10), (60, 5, 10)],
)
def test_long_steps_are_fewer_but_never_less_than_tell_something(
    step_s: float, steps: int, warmup: int
) -> None:
    found = with_run_length(experiment_design(warmup_steps=10_000), step_s, interleaved=False).plan
    assert (found.steps, found.warmup_steps) == (steps, warmup)


@pytest.mark.parametrize(
    ("step_s", "planned", "optimizers", "warmup"),
    [
        (0.1, 10, 1, 10),
        (1, 10, 1, 5),
        (60, 10, 1, 3),
        (60, 12, 1, 5),  # Two steps more, until what workers made ahead is used up.
        (60, 100, 1, 10),
        (60, 10, 2, 7),
    ],
)
def test_a_script_whose_steps_are_long_warms_up_in_few(
    step_s: float, planned: int, optimizers: int, warmup: int
) -> None:
    seen = ScriptProfile(optimizers=("SGD", "Adam")[:optimizers])
    script = dataclasses.replace(experiment_design(warmup_steps=planned), profile=seen)
    assert with_run_length(script, step_s, interleaved=True).plan.warmup_steps == warmup


@pytest.mark.parametrize(
    ("batches", "accumulate", "device", "steps"),
    [
        (24, 1, "cuda", 150),
        (300, 1, "cuda", 70),
        (300, 8, "cuda", 150),
        (None, 1, "cuda", 70),
        (24, 1, "cpu", 200),
    ],
)
def test_short_passes_are_timed_for_longer(
    batches: int | None, accumulate: int, device: str, steps: int
) -> None:
    """Of steps of 15 ms one second is timed on a GPU, of several passes two."""
    script = experiment_design(device=device, accumulate=accumulate)
    script = dataclasses.replace(
        script, profile=ScriptProfile(loader=DataLoaderProfile(batches_per_epoch=batches))
    )
    assert with_run_length(script, 0.015, interleaved=True).plan.steps == steps


@pytest.mark.parametrize(
    ("waits_ms", "busy_ms", "given_s"), [(0.0, 0.0, 1.0), (900.0, 0.0, 0.1), (900.0, 400.0, 0.4)]
)
def test_turns_with_given_batches_do_not_take_what_a_first_look_saw_waited_for(
    waits_ms: float, busy_ms: float, given_s: float
) -> None:
    seen = ScriptProfile(
        input_wait_ms=waits_ms,
        trace=TraceSummary(steps=3, layout_copy_ms=(), device_busy_ms=busy_ms),
    )
    asked = dataclasses.replace(
        experiment_design(steps=20, warmup_steps=10, workers=1), profile=seen
    )
    real, given = (
        interleaved_seconds(asked, [asked.actual()], 1.0),
        interleaved_seconds(asked, [asked.actual("replayed")], 1.0),
    )
    assert real == 20
    assert given == pytest.approx((20 + 10) * given_s)
    both = interleaved_seconds(asked, [asked.actual(), asked.actual("replayed")], 1.0)
    # Twenty steps of each, and two changes to each, of ten steps.
    assert both == pytest.approx(40 + 40 * given_s)
    assert (
        interleaved_seconds(
            dataclasses.replace(asked, profile=None), [asked.actual("replayed")], 1.0
        )
        == 30
    )
