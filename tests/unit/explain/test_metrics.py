"""From measurements to the numbers that trials compare."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from made import machine, plan
from nfold.core.measurement import Epoch, EpochGap, Measurement, RankSamples, Status, Window
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.explain.metrics import compute_metrics, relative_standard_error

HOST = machine()


def _rank(rank: int, seconds: list[float], samples: int = 80, **more: Any) -> RankSamples:
    windows = tuple(Window(start_s=0, seconds=s, steps=10, samples=samples) for s in seconds)
    steps = tuple(1e2 * s for s in seconds for _ in range(10))
    return RankSamples(rank=rank, device="cpu", windows=windows, step_ms=steps, **more)


def _of(*ranks: RankSamples, status: Status = "ok", **changes: Any) -> Measurement:
    asked = plan(HOST, devices=len(ranks), batch=8 * len(ranks), **changes)
    return Measurement(
        id="m",
        workload=Workload(name="digits"),
        plan=asked,
        machine=HOST,
        status=status,
        ranks=ranks,
    )


def test_of_ranks_that_wait_the_slowest_window_counts() -> None:
    found = compute_metrics(
        _of(_rank(0, [0.1, 0.1, 0.1]), _rank(1, [0.2, 0.3, 0.2])), ranks_synchronize=True
    )
    assert found == {"step": pytest.approx(20)}


def test_of_ranks_that_do_not_wait_each_counts() -> None:
    found = compute_metrics(
        _of(_rank(0, [0.1, 0.1]), _rank(1, [0.3, 0.3])), ranks_synchronize=False
    )
    assert found == {
        "step": pytest.approx(20),
        "slowest": pytest.approx(30),
        "rank 0": pytest.approx(10),
        "rank 1": pytest.approx(30),
    }


def test_steps_are_counted_by_their_samples() -> None:
    """A tenth step over a smaller batch does not make steps look faster."""
    found = compute_metrics(_of(_rank(0, [0.076] * 3, samples=76)), ranks_synchronize=True)
    assert found["step"] == pytest.approx(8.0)


def test_a_window_of_an_epochs_last_few_samples_is_no_whole_batch() -> None:
    """One of 64 samples was left: its step took less than half of a whole one's."""
    whole = _rank(0, [0.076] * 2, samples=76)
    last = dataclasses.replace(whole.windows[0], seconds=0.003, steps=1, samples=1)
    found = compute_metrics(
        _of(dataclasses.replace(whole, windows=(*whole.windows, last, last))),
        ranks_synchronize=True,
    )
    assert found["step"] == pytest.approx(8.0)
    only = compute_metrics(_of(dataclasses.replace(whole, windows=(last,))), ranks_synchronize=True)
    assert only["step"] == pytest.approx(24.0)


def test_a_pass_s_last_steps_count_as_what_they_are_of_it() -> None:
    """Its loader is ahead by then: passes of 20 steps of 10 ms and 4 of 5 take 9.2 a step."""
    windows, first = [], 0
    for _ in range(3):
        for steps, seconds, gap in ((20, 0.2, EpochGap(seconds=0.1, steps=24)), (4, 0.02, None)):
            made = Window(start_s=0, seconds=seconds, steps=steps, samples=8 * steps)
            windows.append(dataclasses.replace(made, first_step=first, epoch_gap=gap))
            first += steps
    rank = dataclasses.replace(_rank(0, [0.1]), windows=tuple(windows[1:]))
    found = compute_metrics(_of(rank), ranks_synchronize=True)
    assert found["step"] == pytest.approx(220 / 24)


def test_a_window_that_another_turn_lies_before_is_one_of_its_own() -> None:
    long = Window(start_s=0, seconds=0.2, steps=20, samples=160, first_step=0)
    short = Window(start_s=0, seconds=0.02, steps=4, samples=32, first_step=100)
    rank = dataclasses.replace(_rank(0, [0.1]), windows=(long, short))
    assert compute_metrics(_of(rank), ranks_synchronize=True)["step"] == pytest.approx(10)
    rank = dataclasses.replace(rank, windows=(long, dataclasses.replace(short, first_step=20)))
    assert compute_metrics(_of(rank), ranks_synchronize=True)["step"] == pytest.approx(220 / 24)


def test_what_no_window_holds_is_between_epochs() -> None:
    epochs = tuple(Epoch(seconds=0.25, samples=160, train_loss=1.0) for _ in range(3))
    rank = _rank(0, [0.1] * 5, warmup_steps=10, epochs=epochs)
    assert compute_metrics(_of(rank), ranks_synchronize=True)["gap"] == pytest.approx(2.5)


def test_a_failure_has_no_readings() -> None:
    assert compute_metrics(_of(_rank(0, [0.1]), status="oom"), ranks_synchronize=True) == {}
    assert compute_metrics(_of(RankSamples(rank=0, device="cpu")), ranks_synchronize=True) == {}


def test_the_scatter_inside_a_run() -> None:
    assert relative_standard_error(_of(_rank(0, [0.1]))) == 0
    assert relative_standard_error(_of(_rank(0, [0.1] * 4))) == 0
    assert relative_standard_error(_of(_rank(0, [0.1, 0.12, 0.1, 0.12]))) == pytest.approx(
        0.084, rel=0.02
    )


def test_one_window_in_which_something_is_recorded_is_no_scatter_of_the_others() -> None:
    steady = [0.1, 0.102, 0.1, 0.098, 0.1, 0.101]
    assert relative_standard_error(_of(_rank(0, [*steady, 12.0]))) < 2 * relative_standard_error(
        _of(_rank(0, steady))
    )


def test_between_passes_the_rank_counts_that_waits_least() -> None:
    """Where a batch comes late the others wait in their step."""

    def rank(number: int, *waits: float | None) -> RankSamples:
        made = _rank(number, [0.1] * len(waits))
        between = [
            None if s is None else EpochGap(seconds=s, steps=20, waited_s=s / 2) for s in waits
        ]
        windows = zip(made.windows, between, strict=True)
        ends = tuple(dataclasses.replace(window, epoch_gap=one) for window, one in windows)
        return dataclasses.replace(made, windows=ends)

    both = rank(0, None, 0.1, 0.4), rank(1, None, 0.3, 0.2)
    found = compute_metrics(_of(*both, epochs=None, steps=30), ranks_synchronize=True)
    assert found["gap"] == pytest.approx((100 / 20 + 200 / 20) / 2)
    assert found["first"] == pytest.approx(found["gap"] / 2)
    short = dataclasses.replace(
        _of(*both, epochs=None, steps=30), variant=Variant(batches_per_epoch=10)
    )
    assert compute_metrics(short, ranks_synchronize=True)["gap"] == pytest.approx(
        (300 / 20 + 400 / 20) / 2
    )
    apart = _of(rank(0, None), rank(1, 0.1), epochs=None, steps=10)
    assert "gap" not in compute_metrics(apart, ranks_synchronize=True)
