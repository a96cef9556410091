"""Resident input equals a loader's; refused where it does not fit."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from made import arrays, task
from nfold.core.errors import OutOfMemory
from nfold.engines.torch.input import device_dataset
from nfold.engines.torch.input.dataloader import ArrayBatches, BatchKeySampler
from nfold.engines.torch.input.device_dataset import (
    ResidentSource,
    check_fits,
    copy_in_chunks,
    dataset_bytes,
)

CPU = torch.device("cpu")
SAMPLES = 103


def _compare(limit: int | None, batch: int, rank: int, ranks: int, epoch: int = 0) -> int:
    """Compare a resident source with a loader's data set, batch by batch; how many there were."""
    data = arrays(SAMPLES)
    requested = task(batch=batch, rank=rank, world_size=ranks)
    stream = BatchKeySampler(SAMPLES, requested, limit=limit)
    source = ResidentSource(data, BatchKeySampler(SAMPLES, requested, limit=limit), CPU)
    stream.epoch = source.epoch = epoch
    found = list(source)
    assert len(found) == len(source) == len(stream)
    for key, got in zip(stream, found, strict=True):
        expected = ArrayBatches(data, None)[key]
        for mine, theirs in zip(source.unpack(got.tensors), expected.tensors, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        assert isinstance(got.epoch, torch.Tensor)
        assert got.epoch.dim() == 0
        assert int(got.epoch) == expected.epoch
        assert (got.count, got.global_count) == (expected.count, expected.global_count)
        assert got.sample_hash == expected.sample_hash
    return len(found)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize("batch", [10, 17, 103, 200])
def test_batches_are_the_loader_s(batch: int, rank: int, ranks: int) -> None:
    """Uneven last batches, and batches that do not divide by the ranks, among them."""
    assert _compare(None, batch, rank, ranks, epoch=4) == -(-SAMPLES // batch)


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_without_a_sample_gets_one_that_is_neither_counted_nor_hashed(rank: int) -> None:
    assert _compare(None, 34, rank, 4) == 4


@pytest.mark.parametrize("limit", [1, 11, 25])
def test_a_run_in_steps_continues_across_epochs(limit: int) -> None:
    assert _compare(limit, 10, 1, 2) == limit


def test_epochs_may_be_requested_in_any_order() -> None:
    source = ResidentSource(arrays(40), BatchKeySampler(40, task(batch=40)), CPU)
    for epoch in (0, 1, 5, 5, 2):
        source.epoch = epoch
        (batch,) = source
        expected = BatchKeySampler(40, task(batch=40)).epoch_order(epoch)
        assert np.array_equal(batch.tensors[0].numpy(), expected)


def test_the_next_order_is_begun_before_it_is_needed() -> None:
    source = ResidentSource(arrays(40), BatchKeySampler(40, task(batch=40)), CPU)
    next(iter(source))
    assert list(source._prefetcher._begun) == [1]


def test_a_step_takes_its_ids_from_the_epoch_s_one_tensor() -> None:
    source = ResidentSource(arrays(40), BatchKeySampler(40, task(batch=8)), CPU)
    batches = list(source)
    shared = {batch.tensors[0].untyped_storage().data_ptr() for batch in batches}
    assert len(shared) == 1
    assert all(after.epoch is before.epoch for before, after in pairwise(batches))


def test_the_data_set_is_copied_whole_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    images = arrays(23).train_images
    monkeypatch.setattr(device_dataset, "CHUNK_BYTES", 5 * images[0].nbytes)
    copy = copy_in_chunks(images, CPU)
    assert copy.dtype == torch.uint8
    assert np.array_equal(copy.numpy(), images)
    assert not np.shares_memory(copy.numpy(), images)


def test_four_fifths_of_the_free_memory_may_be_taken() -> None:
    check_fits(800, 1000, "cuda:0")
    with pytest.raises(OutOfMemory):
        check_fits(801, 1000, "cuda:0")


def test_out_of_memory_names_both_sizes_and_the_next_step() -> None:
    with pytest.raises(OutOfMemory) as refused:
        check_fits(3 * 2**30, 2 * 2**30, "cuda:1")
    assert str(refused.value) == (
        "input 'resident' needs 3 GiB on cuda:1; allowed are 80% of the free 2 GiB; "
        "next: --input loader"
    )
    assert refused.value.status == "oom"


def test_shards_may_fit_where_the_whole_does_not() -> None:
    check_fits(1600, 1000, "each of 2 GPUs", sharded_bytes=800)
    with pytest.raises(OutOfMemory) as refused:
        check_fits(3 * 2**30, 2**30, "each of 2 GPUs", sharded_bytes=3 * 2**29)
    assert str(refused.value) == (
        "input 'resident' needs 3 GiB (1.5 GiB sharded) on each of 2 GPUs; allowed are 80% of the "
        "free 1 GiB; next: --input loader"
    )


def test_bytes_are_those_of_images_and_labels() -> None:
    needed = 40 * (8 * 8 + 8)
    assert dataset_bytes(arrays(40)) == needed
    assert ResidentSource(arrays(40), BatchKeySampler(40, task(batch=8)), CPU).data_bytes == needed
