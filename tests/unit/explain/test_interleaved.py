"""Rungs that took turns: what cycles do to all of them cancels, what is left is the error."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from made import machine, plan
from nfold.core.interleave import MAX_CYCLES
from nfold.core.measurement import Measurement, RankSamples, Window
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.explain.design import Trial
from nfold.explain.estimate.interleaved import (
    changing_batches,
    interleaved_metrics,
    split_by_cycle,
    unsteady_steps,
)

HOST = machine()
PLAN = plan(HOST, devices=2, batch=16)
FULL, BARE = Trial(plan=PLAN), Trial(plan=PLAN, variant=Variant(exchange="none"))
STEPS = 10


def _of(trial: Trial, step_ms: Sequence[float], steps: Sequence[int] = ()) -> Measurement:
    """Two ranks alike, a window for each of the given milliseconds."""
    sizes = steps or [STEPS] * len(step_ms)
    windows = tuple(
        Window(start_s=0, seconds=ms * size / 1e3, steps=size, samples=8 * size)
        for ms, size in zip(step_ms, sizes, strict=True)
    )
    times = tuple(ms for ms, size in zip(step_ms, sizes, strict=True) for _ in range(size))
    ranks = (RankSamples(rank=k, device="cpu", windows=windows, step_ms=times) for k in range(2))
    return Measurement(
        id="m",
        workload=Workload(name="digits"),
        plan=PLAN,
        machine=HOST,
        status="ok",
        variant=trial.variant or None,
        ranks=tuple(ranks),
    )


def test_drift_that_meets_all_alike_is_neither_cost_nor_error() -> None:
    drift = (1.0, 1.3, 0.8, 1.1)
    found, errors = interleaved_metrics(
        {FULL: _of(FULL, [12 * d for d in drift]), BARE: _of(BARE, [10 * d for d in drift])}
    )
    assert found[FULL]["step"] / found[BARE]["step"] == pytest.approx(1.2)
    assert found[BARE]["rank 1"] == pytest.approx(found[BARE]["step"])
    assert errors == pytest.approx({FULL: 0, BARE: 0}, abs=1e-9)


def test_one_disturbed_turn_moves_no_reading() -> None:
    third = Trial(plan=PLAN, variant=Variant(exchange="barrier"))
    found, errors = interleaved_metrics(
        {
            FULL: _of(FULL, [12.0] * 4),
            BARE: _of(BARE, [10.0, 10.0, 17.0, 10.0]),
            third: _of(third, [11.0] * 4),
        }
    )
    assert found[FULL]["step"] == pytest.approx(12.0)
    assert found[BARE]["step"] == pytest.approx(10.0)
    assert errors[BARE] > 0.05
    assert errors[FULL] == pytest.approx(0, abs=1e-9)


def test_the_error_is_about_that_of_the_readings() -> None:
    draws = random.Random(1)
    off, said = [], []
    for _ in range(200):
        members = {
            Trial(plan=PLAN, variant=left_out): [draws.lognormvariate(0, 0.04) for _ in range(4)]
            for left_out in (Variant(), Variant(exchange="none"), Variant(exchange="barrier"))
        }
        found, errors = interleaved_metrics(
            {trial: _of(trial, times) for trial, times in members.items()}
        )
        off.append(found[FULL]["step"] / found[BARE]["step"] - 1)
        said.append((sum(error**2 for error in errors.values()) / len(errors)) ** 0.5)
    of_differences = (sum(x * x for x in off) / len(off)) ** 0.5
    assert sum(said) / len(said) * 2**0.5 == pytest.approx(of_differences, rel=0.3)


def test_turns_that_follow_each_other_are_cut_between_their_cycles() -> None:
    """At a turning point of the order a trial has two turns, and one window may be of both."""
    sizes = [10, 10, 5, 10, 10, 10, 10, 10, 10, 10, 5]
    parts = split_by_cycle(_of(FULL, [1.0] * len(sizes), sizes), MAX_CYCLES)
    assert [sum(w.steps for w in part.ranks[1].windows) for part in parts] == [25, 20, 30, 25]
    assert [len(part.ranks[0].step_ms) for part in parts] == [25, 20, 30, 25]


def test_one_window_each_tells_no_error() -> None:
    found, errors = interleaved_metrics({FULL: _of(FULL, [12.0]), BARE: _of(BARE, [10.0])})
    assert found[FULL]["step"] == pytest.approx(12.0)
    assert errors == {FULL: 0, BARE: 0}


def test_a_host_swings_as_much_as_a_step_with_the_same_batches() -> None:
    """Of three kinds of such steps the one in the middle; real input varies by itself."""
    replayed = [Trial(plan=PLAN, variant=Variant(input="replayed", threads=n)) for n in (1, 2, 4)]
    made = {
        FULL: _of(FULL, [10.0, 20.0, 30.0, 40.0]),
        replayed[0]: _of(replayed[0], [10.0, 10.0, 10.0, 10.0]),
        replayed[1]: _of(replayed[1], [10.0, 12.0, 11.0, 10.0]),
        replayed[2]: _of(replayed[2], [10.0, 90.0, 10.0, 10.0]),
    }
    found = unsteady_steps(made)
    assert found is not None
    assert (found.low_ms, found.high_ms, found.ratio) == pytest.approx((10.0, 12.0, 1.2))
    assert unsteady_steps({FULL: made[FULL]}) is None


@pytest.mark.parametrize(
    ("real", "given", "times"),
    [
        ((12, 18, 24, 30), (6, 6, 6, 6), 2.5),
        ((30, 24, 18, 12), (6, 6, 6, 6), 0.4),
        ((12, 18, 24, 30), (6, 9, 12, 15), 1.0),
        ((24, 12, 18, 30), (6, 6, 6, 6), None),
        ((12, 18, 24, 30), None, None),
        ((12, 30), (6, 6), None),
    ],
)
def test_what_own_batches_do_from_turn_to_turn(
    real: tuple[float, ...], given: tuple[float, ...] | None, times: float | None
) -> None:
    replayed = Trial(plan=PLAN, variant=Variant(input="replayed"))
    members = {FULL: _of(FULL, real)}
    if given:
        members[replayed] = _of(replayed, given)
    found = changing_batches(members)
    assert (None if found is None else found.ratio) == pytest.approx(times)
