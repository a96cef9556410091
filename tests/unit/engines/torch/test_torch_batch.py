"""Batches: all tensors are moved."""

import torch

from nfold.engines.torch.batch import Batch


def _batch(count: int, values: torch.Tensor) -> Batch:
    return Batch(
        tensors=(values, values + 1, values + 2),
        epoch=3,
        count=count,
        global_count=10,
        sample_hash=7,
    )


def test_moving_moves_every_tensor_and_keeps_the_rest() -> None:
    batch = _batch(2, torch.arange(3))
    moved = batch.map_tensors(lambda tensor: tensor * 2)
    pairs = zip(batch.tensors, moved.tensors, strict=True)
    assert all(torch.equal(after, before * 2) for before, after in pairs)
    assert not any(isinstance(value, torch.Tensor) for value in vars(moved).values())
    assert (moved.epoch, moved.count, moved.global_count, moved.sample_hash) == (3, 2, 10, 7)
