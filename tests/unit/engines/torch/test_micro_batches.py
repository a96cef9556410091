"""Micro-batches: every sample in one of them, weights that add up, equally many on every rank."""

from __future__ import annotations

import pytest
import torch

from nfold.engines.sampling import split_batch
from nfold.engines.torch.batch import split_micro_batches

CASES = [(10, 4, 1), (64, 2, 2), (61, 2, 3), (61, 3, 2), (5, 2, 3), (3, 4, 2), (1, 2, 4)]
"""Samples of a global batch, ranks, and the parts asked for."""
every_case = pytest.mark.parametrize(("samples", "ranks", "accumulate"), CASES)


@every_case
def test_weights_make_the_mean_over_ranks_the_mean_over_the_batch(
    samples: int, ranks: int, accumulate: int
) -> None:
    values = torch.arange(1.0, samples + 1, dtype=torch.float64)
    gradient = torch.zeros((), dtype=torch.float64)
    for rank in range(ranks):
        ids = [
            at
            for piece in split_batch(samples, rank, ranks, min(accumulate, samples))
            for at in piece
        ]
        own = values[ids or [0]]
        parts = split_micro_batches(samples, rank, ranks, accumulate)
        means = [part.select_rows((own,))[0].mean() for part in parts]
        gradient += sum(m * p.gradient_weight for m, p in zip(means, parts, strict=True)) / ranks
        loss = sum(m * p.loss_weight for m, p in zip(means, parts, strict=True))
        assert loss == pytest.approx(float(own.mean()) if ids else 0.0)
    assert torch.isclose(gradient, values.mean())


@every_case
def test_every_rank_has_as_many_parts_and_some_rank_a_sample_in_each(
    samples: int, ranks: int, accumulate: int
) -> None:
    every = [split_micro_batches(samples, rank, ranks, accumulate) for rank in range(ranks)]
    assert len({len(parts) for parts in every}) == 1
    assert len(every[0]) <= accumulate
    for together in zip(*every, strict=True):
        assert all(part.rows > 0 for part in together)
        assert any(part.share.count for part in together)
        assert len({(part.share.micro_batches, part.share.is_last) for part in together}) == 1
    assert [part.share.is_last for part in every[0]].index(True) == len(every[0]) - 1


@pytest.mark.parametrize(("samples", "accumulate"), [(64, 2), (61, 3), (7, 2), (2, 3)])
def test_parts_of_all_ranks_together_do_not_depend_on_their_number(
    samples: int, accumulate: int
) -> None:
    one_device = [list(piece) for piece in split_batch(samples, 0, 1, min(accumulate, samples))]
    for ranks in (2, 3, 4):
        every = [
            split_batch(samples, rank, ranks, min(accumulate, samples)) for rank in range(ranks)
        ]
        together = [[at for piece in part for at in piece] for part in zip(*every, strict=True)]
        assert together == one_device


def test_one_part_is_the_batch_itself() -> None:
    (part,) = split_micro_batches(7, 0, 2, 1)
    tensors = (torch.arange(3), torch.empty(0))
    assert part.select_rows(tensors) is tensors
    assert (part.loss_weight, part.gradient_weight, part.rows) == (1.0, 6 / 7, 3)


def test_a_part_takes_its_rows_of_every_tensor_and_nothing_of_an_empty_one() -> None:
    first, second = split_micro_batches(5, 0, 1, 2)
    tensors = (torch.arange(5), torch.empty(0))
    assert [one.tolist() for one in first.select_rows(tensors)] == [[0, 1], []]
    assert [one.tolist() for one in second.select_rows(tensors)] == [[2, 3, 4], []]
