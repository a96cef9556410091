"""What a rank does between two passes, while the others wait for it in a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from made import machine, plan
from nfold.core.measurement import EpochGap, Measurement, RankSamples, Window
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.explain.design import Trial
from nfold.explain.metrics import equalize_epoch_gaps
from nfold.explain.trials import TrialResults

PLAN = plan(machine(), devices=2, batch=16, steps=40)
STEPS, PASS = 10, 20
"""Of a window, and of a pass over the data."""
STEP_MS = 13.0


def _rank(number: int, between_ms: float, first_ms: float, at: int = 0) -> RankSamples:
    """Two windows a pass, of which the first begins with a step of its own length."""
    windows, times = [], list[float]()
    for first in range(at, at + 60, STEPS):
        begins = first % PASS == at % PASS
        own = [first_ms if begins else STEP_MS, *[STEP_MS] * (STEPS - 1)]
        windows.append(
            Window(
                start_s=0.0,
                seconds=sum(own) / 1e3,
                steps=STEPS,
                samples=8 * STEPS,
                first_step=first,
                epoch_gap=EpochGap(seconds=between_ms / 1e3, steps=PASS) if begins else None,
            )
        )
        times += own
    return RankSamples(rank=number, device="cpu", windows=tuple(windows), step_ms=tuple(times))


def _of(*ranks: RankSamples, **changes: Any) -> Measurement:
    return dataclasses.replace(
        Measurement(
            id="m",
            workload=Workload(name="train.py", script=("train.py",)),
            plan=PLAN,
            machine=machine(),
            status="ok",
            ranks=ranks,
        ),
        **changes,
    )


def test_what_one_rank_does_between_passes_is_in_no_step_of_the_others() -> None:
    """Rank 0 saves for 300 ms at the end of every pass."""
    measured = _of(_rank(0, 300.0, STEP_MS), _rank(1, 1.0, STEP_MS + 299.0))
    found = equalize_epoch_gaps(measured)
    for rank in found.ranks:
        assert rank.step_ms == pytest.approx((STEP_MS,) * 60)
        assert [window.seconds for window in rank.windows] == pytest.approx([0.13] * 6)
        passes = [window.epoch_gap.seconds for window in rank.windows if window.epoch_gap]
        assert passes == pytest.approx([0.3] * 3)
    assert found.ranks[0] == measured.ranks[0]


@pytest.mark.parametrize(
    "ranks",
    [
        (_rank(0, 300.0, 500.0), _rank(1, 300.0, 500.0)),
        (_rank(0, 300.0, STEP_MS), _rank(1, 1.0, STEP_MS)),
        (_rank(0, 300.0, STEP_MS), _rank(1, 1.0, 312.0, at=PASS)),
        (_rank(0, 300.0, 500.0),),
    ],
)
def test_what_is_late_for_anything_else_is_late(ranks: tuple[RankSamples, ...]) -> None:
    """A first batch of all ranks, ranks that do not wait, other steps, one rank."""
    assert equalize_epoch_gaps(_of(*ranks)) == _of(*ranks)


def test_no_rank_waits_longer_than_another_is_away() -> None:
    found = equalize_epoch_gaps(_of(_rank(0, 300.0, STEP_MS), _rank(1, 1.0, STEP_MS + 350.0)))
    assert found.ranks[1].step_ms[0] == pytest.approx(STEP_MS + 51.0)


def test_a_run_that_failed_stays_as_it_is() -> None:
    ranks = (_rank(0, 300.0, STEP_MS), _rank(1, 1.0, 312.0))
    for failed in (_of(*ranks, status="hung"), _of(*ranks, ranks=())):
        assert equalize_epoch_gaps(failed) == failed


@pytest.mark.parametrize(
    ("left_out", "gap_ms"), [(Variant(), 15.0), (Variant(exchange="none"), 0.05)]
)
def test_it_is_a_part_of_every_step_of_ranks_that_wait(left_out: Variant, gap_ms: float) -> None:
    trial = Trial(plan=PLAN, variant=left_out)
    first_ms = STEP_MS + 299.0 if trial.ranks_synchronize else STEP_MS
    measured = TrialResults()
    ranks = (_rank(0, 300.0, STEP_MS), _rank(1, 1.0, first_ms))
    measured.add(trial, 0, _of(*ranks, variant=left_out or None))
    view = measured.fit(20).view
    assert view.epoch_gap(trial) == pytest.approx(gap_ms)
    assert view.step(trial) == pytest.approx(STEP_MS)


@pytest.mark.parametrize(
    ("apart", "waited"),
    [
        # Both begin their workers at once; those of rank 0 take longer for the first batch.
        ([(300.0, 300.0), (200.0, 200.0)], 300.0),
        # Rank 0 saves for 20 ms before it asks.
        ([(300.0, 280.0), (200.0, 200.0)], 280.0),
        # Rank 1 evaluates for 250 ms: without any wait, rank 0 would have begun then.
        ([(300.0, 300.0), (260.0, 10.0)], 50.0),
        # Rank 0 evaluates, and its workers have the batch by then.
        ([(300.0, 0.0), (100.0, 100.0)], 0.0),
    ],
)
def test_the_wait_for_first_batches_is_that_of_all(
    apart: list[tuple[float, float]], waited: float
) -> None:
    longest = max(between for between, _ in apart)
    ranks = []
    for number, (between_ms, own_ms) in enumerate(apart):
        rank = _rank(number, between_ms, STEP_MS + longest - between_ms)
        windows = tuple(
            window
            if window.epoch_gap is None
            else dataclasses.replace(
                window, epoch_gap=dataclasses.replace(window.epoch_gap, waited_s=own_ms / 1e3)
            )
            for window in rank.windows
        )
        ranks.append(dataclasses.replace(rank, windows=windows))
    for rank in equalize_epoch_gaps(_of(*ranks)).ranks:
        found = [window.epoch_gap for window in rank.windows if window.epoch_gap is not None]
        assert [one.seconds for one in found] == pytest.approx([longest / 1e3] * 3)
        assert [one.waited_s for one in found] == pytest.approx([waited / 1e3] * 3)
