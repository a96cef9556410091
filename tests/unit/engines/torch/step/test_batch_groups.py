"""Equal batches are grouped into one call, in order, each once."""

from __future__ import annotations

import pytest
import torch

from nfold.engines.torch.batch import Batch
from nfold.engines.torch.step.training_step import group_batches


def batch(number: int, samples: int = 4, epoch: int = 0) -> Batch:
    ids = torch.full((samples,), number)
    return Batch(
        tensors=(ids,), epoch=epoch, count=samples, global_count=samples, sample_hash=number
    )


def grouped(batches: list[Batch], most: int, apart: int = 0) -> list[list[int]]:
    found = group_batches(iter(batches), most, single_batches=apart)
    return [[one.sample_hash for one in chain] for chain in found]


@pytest.mark.parametrize(
    ("most", "apart", "expected"),
    [
        (1, 0, [[0], [1], [2], [3], [4], [5], [6]]),
        (3, 0, [[0, 1, 2], [3, 4, 5], [6]]),
        (3, 2, [[0], [1], [2, 3, 4], [5], [6]]),
        (4, 5, [[0], [1], [2], [3], [4], [5], [6]]),
    ],
)
def test_alike_batches_come_together(most: int, apart: int, expected: list[list[int]]) -> None:
    assert grouped([batch(number) for number in range(7)], most, apart) == expected


@pytest.mark.parametrize("other", [{"samples": 3}, {"epoch": 1}])
def test_a_batch_of_another_form_or_epoch_ends_a_chain(other: dict[str, int]) -> None:
    batches = [batch(0), batch(1), batch(2), batch(3, **other), batch(4), batch(5)]
    assert grouped(batches, 2) == [[0, 1], [2], [3], [4, 5]]


def test_nothing_is_requested_before_it_is_needed() -> None:
    """A chain is made as soon as its batches are there."""
    requested = list[int]()

    def source() -> object:
        for number in range(4):
            requested.append(number)
            yield batch(number)

    found = group_batches(source(), 2)  # type: ignore[arg-type]
    next(found)
    assert requested == [0, 1]
