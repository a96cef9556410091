"""The samples of a step do not depend on the number of devices; each is used once."""

from functools import partial

import numpy as np
import pytest
import torch

from made import arrays, task
from nfold.engines.sampling import sample_hash
from nfold.engines.torch.batch import SampleTensors
from nfold.engines.torch.input.dataloader import (
    ArrayBatches,
    BatchKeySampler,
    LoaderSource,
    build_loader,
    queued_input_notes,
)
from nfold.engines.torch.input.preprocessing import build_augmentation


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_number_of_ranks_sees_the_same_samples_in_the_same_steps(
    ranks: int, accumulate: int
) -> None:
    """In the same order too, unless ranks are interleaved in the parts of a step."""
    whole = [key.ids for key in BatchKeySampler(103, task(batch=10))]
    requested = partial(task, batch=10, accumulate=accumulate, world_size=ranks)
    streams = [BatchKeySampler(103, requested(rank=r)) for r in range(ranks)]
    steps = list(zip(*streams, strict=True))
    assert len(steps) == len(whole) == 11
    for expected, keys in zip(whole, steps, strict=True):
        got = np.concatenate([key.ids[: key.count] for key in keys])
        assert np.array_equal(np.sort(got), np.sort(expected))
        assert accumulate > 1 or np.array_equal(got, expected)
        assert {key.global_count for key in keys} == {len(expected)}


def test_an_epoch_has_every_sample_once_and_epochs_differ() -> None:
    stream = BatchKeySampler(103, task(batch=10))
    first = np.concatenate([key.ids for key in stream])
    stream.epoch = 1
    second = np.concatenate([key.ids for key in stream])
    assert sorted(first) == sorted(second) == list(range(103))
    assert not np.array_equal(first, second)


def test_a_stream_in_steps_runs_on_across_epochs() -> None:
    keys = list(BatchKeySampler(103, task(batch=10), limit=25))
    assert len(keys) == 25
    assert [key.epoch for key in keys] == [0] * 11 + [1] * 11 + [2] * 3
    assert len(keys[10].ids) == 3


def test_a_rank_without_a_sample_gets_one_that_does_not_count() -> None:
    last = [list(BatchKeySampler(9, task(batch=8, rank=r, world_size=4)))[-1] for r in range(4)]
    assert sum(key.count for key in last) == 1
    assert all(len(key.ids) == 1 for key in last)


def test_the_hash_ignores_order_and_sees_other_samples() -> None:
    assert sample_hash(np.arange(50)) == sample_hash(np.arange(50)[::-1].copy())
    assert sample_hash(np.arange(50)) != sample_hash(np.arange(1, 51))


@pytest.mark.parametrize("limit", [None, 5, 11, 25])
def test_passes_are_the_epochs_of_the_keys(limit: int | None) -> None:
    stream = BatchKeySampler(103, task(batch=10), limit=limit)
    passes = [epoch for epoch, cuts in stream.epochs() for _ in cuts]
    assert passes == [key.epoch for key in stream]
    assert len(passes) == len(stream)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_the_stream_s_samples_in_order(workers: int) -> None:
    data = arrays(40)
    requested = task(batch=16, workers=workers)
    stream = BatchKeySampler(40, requested)
    batches = list(build_loader(ArrayBatches(data, None), requested, stream))
    assert [batch.count for batch in batches] == [16, 16, 8]
    for key, batch in zip(stream, batches, strict=True):
        samples = SampleTensors(*batch.tensors)
        assert np.array_equal(samples.labels.numpy(), data.train_labels[key.ids])
        assert np.array_equal(samples.images.numpy(), data.train_images[key.ids])
        assert np.array_equal(samples.ids.numpy(), key.ids)
        assert batch.epoch == key.epoch
        assert batch.sample_hash == sample_hash(key.ids)


def test_a_worker_that_augments_sends_no_ids() -> None:
    data = arrays(40)
    (key,) = BatchKeySampler(40, task(batch=40))
    raw = SampleTensors(*ArrayBatches(data, None)[key].tensors)
    augment = build_augmentation((("flip", 0),), data, 0, torch.device("cpu"))
    samples = SampleTensors(*ArrayBatches(data, augment)[key].tensors)
    assert torch.equal(samples.images, augment(raw.images, raw.ids, 0))
    assert not torch.equal(samples.images, raw.images)
    assert len(samples.ids) == 0


def test_a_loaded_epoch_is_the_one_that_was_set() -> None:
    data, requested = arrays(40), task(batch=16)
    loaded = LoaderSource(
        ArrayBatches(data, None), requested, BatchKeySampler(40, requested), torch.device("cpu")
    )
    loaded.epoch = 3
    assert (loaded.epoch, len(loaded)) == (3, 3)
    expected = BatchKeySampler(40, requested).epoch_order(3)
    assert np.array_equal(
        torch.cat([loaded.unpack(b.tensors).ids for b in loaded]).numpy(), expected
    )


@pytest.mark.parametrize(
    ("steps", "workers", "advice"), [(10, 15, "--steps 600"), (100, 3, "--steps 120")]
)
def test_batches_that_were_ready_are_a_caveat(steps: int, workers: int, advice: str) -> None:
    ((kind, text),) = queued_input_notes(task(steps=steps, workers=workers).plan)
    assert kind == "queued_input"
    assert advice in text


@pytest.mark.parametrize(("steps", "workers"), [(600, 15), (10, 0), (None, 15)])
def test_a_long_run_raises_none(steps: int | None, workers: int) -> None:
    assert queued_input_notes(task(steps=steps, workers=workers).plan) == ()
