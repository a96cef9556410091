"""Steps divided over ranks and micro-batches: each sample once, with the right weight."""

from __future__ import annotations

import pytest

from nfold.engines.sampling import BatchDivision, epoch_order


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("samples", [1, 7, 10, 37])
def test_every_sample_is_in_one_slice(samples: int, parts: int, ranks: int) -> None:
    slices = [
        part
        for rank in range(ranks)
        for part in BatchDivision(
            batch=10, rank=rank, ranks=ranks, micro_batches=parts
        ).epoch_slices(samples)
    ]
    seen = [n for part in slices if not part.is_padding for n in part.positions]
    assert sorted(seen) == list(range(samples))
    assert len(slices) == ranks * parts * -(-samples // 10)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 3])
def test_weights_of_a_step_sum_to_one(parts: int, ranks: int) -> None:
    steps: dict[int, float] = {}
    for rank in range(ranks):
        division = BatchDivision(batch=10, rank=rank, ranks=ranks, micro_batches=parts)
        for number, part in enumerate(division.epoch_slices(37)):
            step = number // parts
            steps[step] = steps.get(step, 0) + part.share.weight
            assert part.share.is_last == (number % parts == parts - 1)
    assert list(steps.values()) == pytest.approx([1.0] * 4)


def test_a_rank_without_a_sample_gets_one_that_counts_nothing() -> None:
    (only,) = BatchDivision(batch=10, rank=0, ranks=3).epoch_slices(1)
    assert (only.is_padding, only.share.count, len(only.positions)) == (True, 0, 1)
    (last,) = BatchDivision(batch=10, rank=2, ranks=3).epoch_slices(1)
    assert (last.is_padding, last.share.weight) == (False, 1.0)


def test_slices_of_a_step_differ_by_one_sample_at_most() -> None:
    sizes = [
        len(part.positions)
        for rank in range(3)
        for part in BatchDivision(batch=10, rank=rank, ranks=3).epoch_slices(10)
    ]
    assert max(sizes) - min(sizes) == 1


def test_a_dropped_last_batch_is_no_step() -> None:
    division = BatchDivision(batch=10, rank=0, ranks=1, drop_last=True)
    assert division.steps_per_epoch(37) == 3
    assert [part.positions[-1] for part in division.epoch_slices(37)] == [9, 19, 29]


def test_skipped_steps_leave_the_others_as_they_were() -> None:
    division = BatchDivision(batch=10, rank=1, ranks=2, micro_batches=2)
    skipped, whole = (list(division.epoch_slices(37, skip=n)) for n in (2, 0))
    for part, same in zip(skipped, whole[4:], strict=True):
        assert part.share == same.share
        assert part.positions.tolist() == same.positions.tolist()


def test_the_order_depends_on_seed_and_epoch() -> None:
    first = epoch_order(50, seed=0, epoch=0, shuffle=True).tolist()
    assert sorted(first) == list(range(50))
    assert first == epoch_order(50, seed=0, epoch=0, shuffle=True).tolist()
    assert first != epoch_order(50, seed=0, epoch=1, shuffle=True).tolist()
    assert first != epoch_order(50, seed=1, epoch=0, shuffle=True).tolist()
    assert epoch_order(5, seed=0, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3, 4]
