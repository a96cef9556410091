"""Sharded data equal whole resident data on every rank; ranks are threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from made import arrays, task
from nfold.engines.torch.batch import Batch, SampleTensors
from nfold.engines.torch.input.dataloader import BatchKeySampler
from nfold.engines.torch.input.device_dataset import ResidentSource, ShardedSelector, ShardedSource
from rank_threads import on_threads

CPU = torch.device("cpu")
SAMPLES = 103
Shared = list[tuple[Batch, SampleTensors]]


def _all(
    patch: pytest.MonkeyPatch, ranks: int, batch: int, *, limit: int | None, epoch: int
) -> list[Shared]:
    """Every rank's batches with their samples."""

    def work(rank: int) -> Shared:
        requested = task(batch=batch, rank=rank, world_size=ranks)
        source = ShardedSource(
            arrays(SAMPLES), BatchKeySampler(SAMPLES, requested, limit=limit), requested, CPU
        )
        source.epoch = epoch
        return [(got, source.unpack(got.tensors)) for got in source]

    return on_threads(patch, ranks, work)


def _compare(patch: pytest.MonkeyPatch, ranks: int, batch: int, limit: int | None = None) -> None:
    found = _all(patch, ranks, batch, limit=limit, epoch=4)
    for rank, mine in enumerate(found):
        requested = task(batch=batch, rank=rank, world_size=ranks)
        whole = ResidentSource(
            arrays(SAMPLES), BatchKeySampler(SAMPLES, requested, limit=limit), CPU
        )
        whole.epoch = 4
        for (got, samples), expected in zip(mine, whole, strict=True):
            assert all(map(_alike, samples, whole.unpack(expected.tensors)))
            assert int(got.epoch) == int(expected.epoch)
            counts = (expected.count, expected.global_count, expected.sample_hash)
            assert (got.count, got.global_count, got.sample_hash) == counts


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [10, 17, 34, 103, 200])
def test_batches_are_those_of_whole_data(
    monkeypatch: pytest.MonkeyPatch, ranks: int, batch: int
) -> None:
    """Batches that do not divide; last ones of 3, 1 and 1 samples, which leave ranks without."""
    _compare(monkeypatch, ranks, batch)


@pytest.mark.parametrize("limit", [1, 11, 25])
def test_a_run_in_steps_continues_across_epochs(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    _compare(monkeypatch, 3, 10, limit)


def test_shards_are_equal_parts_of_the_data() -> None:
    data, held = arrays(SAMPLES), []
    for rank in range(4):
        requested = task(batch=10, rank=rank, world_size=4)
        source = ShardedSource(data, BatchKeySampler(SAMPLES, requested), requested, CPU)
        held.append((source._images, source._labels))
        assert source.data_bytes in (25 * (64 + 8), 26 * (64 + 8))
        ((kind, text),) = source.notes
        assert (kind, "over 4 devices" in text) == ("sharded", True)
    images, labels = (torch.cat(parts).numpy() for parts in zip(*held, strict=True))
    assert np.array_equal(images, data.train_images)
    assert np.array_equal(labels, data.train_labels)


def test_every_sample_of_a_step_is_sent_once_and_padding_once_more() -> None:
    """Batches of 34 of 103 samples on four ranks: the last is one sample, for which three pad."""
    sent = np.zeros((4, 4), dtype=np.int64)
    for rank in range(4):
        requested = task(batch=34, rank=rank, world_size=4)
        stream = BatchKeySampler(SAMPLES, requested)
        slices = [stream.slices_of(other) for other in range(4)]
        routes = ShardedSelector(SAMPLES, slices, rank, CPU).prepare(stream.epoch_order(0))
        assert len(routes.sends) == np.sum(routes.send_counts)
        sent[rank] = np.sum(routes.send_counts, axis=1)
    assert sent.sum(axis=0).tolist() == [34, 34, 34, 4]


def test_fewer_samples_than_ranks_leave_shards_empty() -> None:
    requested = task(batch=4, world_size=4)
    stream = BatchKeySampler(3, requested)
    slices = [stream.slices_of(rank) for rank in range(4)]
    shards = [ShardedSelector(3, slices, rank, CPU) for rank in range(4)]
    assert [len(range(3)[each.own_rows]) for each in shards] == [0, 1, 1, 1]
    for each in shards:
        assert len(each.prepare(stream.epoch_order(0)).ids) == 1
