"""Input from the host: the samples of a rank in each step, loaded by worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from nfold.data.arrays import DataSetArrays
from nfold.frameworks import stream
from nfold.frameworks.base import Task
from nfold.frameworks.stream import SampleIds, sample_hash
from nfold.frameworks.torch.augment import Augment
from nfold.frameworks.torch.batch import Batch, CanvasTensors, InputSamples, SampleTensors, Tensors
from nfold.frameworks.torch.prefetch import ToDevice, copy_batch, prefetch_batches
from nfold.lifeline import die_with_parent
from nfold.plan import PREFETCH_BATCHES, PREFETCH_WARMUP_FACTOR, Plan

MAX_READY_FRACTION = 0.1
"""The part of the timed steps whose input may lie ready before they begin."""


@dataclass(frozen=True)
class BatchKey:
    """One rank's part of one global batch: sample ids, and how many count (the rest pad)."""

    epoch: int
    ids: SampleIds
    count: int
    global_count: int


class BatchKeySampler(stream.EpochSampler, Sampler[BatchKey]):
    """The keys of one rank, epoch by epoch, or without end across epochs."""

    def __init__(self, samples: int, task: Task, *, limit: int | None = None) -> None:
        stream.EpochSampler.__init__(
            self, samples, task.plan, rank=task.rank, ranks=task.world_size, limit=limit
        )

    def __iter__(self) -> Iterator[BatchKey]:
        for epoch, cuts in self.epochs():
            order = self.epoch_order(epoch)
            for cut in cuts:
                yield BatchKey(epoch, order[cut.positions], cut.count, cut.global_count)


class ArrayBatches(Dataset[Batch]):
    """Whole batches by key: gathered and hashed in one go, in a loader worker.

    ``augment`` is applied there too; without it the ids go with the images, so that they are
    augmented on the device.
    """

    def __init__(self, arrays: DataSetArrays, augment: Augment | None) -> None:
        self._images = arrays.train_images
        self._labels = arrays.train_labels
        self._augment = partial(_augment_images, augment) if augment else _keep_images

    def __getitem__(self, key: BatchKey) -> Batch:
        ids = torch.from_numpy(key.ids)
        images, ids = self._augment(torch.from_numpy(self._images[key.ids]), ids, key.epoch)
        return Batch(
            tensors=(images, torch.from_numpy(self._labels[key.ids]), ids),
            epoch=key.epoch,
            count=key.count,
            global_count=key.global_count,
            sample_hash=sample_hash(key.ids[: key.count]),
        )


def _augment_images(
    augment: Augment, images: Tensor, ids: Tensor, epoch: int
) -> tuple[Tensor, Tensor]:
    """No ids go along: nothing is left to draw, and every tensor costs its way to the device."""
    return augment(images, ids, epoch), torch.empty(0, dtype=torch.int64)


def _keep_images(images: Tensor, ids: Tensor, _epoch: int) -> tuple[Tensor, Tensor]:
    return images, ids


class LoaderSource:
    """Batches from a DataLoader, on the device; iterate once an epoch, after setting ``epoch``."""

    def __init__(
        self,
        batches: Dataset[Batch],
        task: Task,
        sampler: BatchKeySampler,
        device: torch.device,
        to_device: ToDevice = copy_batch,
        notes: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._sampler = sampler
        self._loader = build_loader(batches, task, sampler)
        self._device = device
        self.to_device = to_device
        self._notes = (*notes, *queued_input_notes(task.plan))

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is."""
        return self._sampler.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._sampler.epoch = epoch

    @property
    def data_bytes(self) -> int:
        """None of the data set stays on the device."""
        return 0

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """What there is to say of the data set."""
        return self._notes

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one pass over the data."""
        return self._sampler.steps_per_epoch

    def host_batches(self) -> Iterator[Batch]:
        """The batches as the loader gives them, not yet on the device."""
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        return iter(prefetch_batches(self._loader, self._device, self.to_device))

    def unpack(self, tensors: Tensors) -> InputSamples:
        """The samples, which the tensors are."""
        return (
            SampleTensors(*tensors)
            if len(tensors) == len(SampleTensors._fields)
            else CanvasTensors(*tensors)
        )


def queued_input_notes(plan: Plan) -> tuple[tuple[str, str], ...]:
    """A doubt where a run and its warm-up are too short to show how fast its workers are.

    While the first steps are compiled and warm up, workers fill their queues; timed steps that
    take from there wait for nobody.
    """
    ready, steps = PREFETCH_BATCHES * (plan.workers or 0), plan.steps
    used = (plan.warmup_steps or 0) >= PREFETCH_WARMUP_FACTOR * ready
    if steps is None or ready <= MAX_READY_FRACTION * steps or used:
        return ()
    text = (
        f"the workers may have had {ready} batches ready when the {steps} timed steps began: they "
        f"show what the devices can take; next: --steps {round(ready / MAX_READY_FRACTION)} for the workers"
    )
    return (("queued_input", text),)


def build_loader(
    batches: Dataset[Batch], task: Task, sampler: BatchKeySampler
) -> DataLoader[Batch]:
    """A DataLoader over ``stream``: persistent workers, batches made ahead, pinned for GPUs.

    It seeds its workers from a generator of its own: how often it does depends on where a
    resumed run began, and dropout draws from the default one.
    """
    workers = task.plan.workers or 0
    return DataLoader(
        batches,
        batch_size=None,
        sampler=sampler,
        collate_fn=_identity,
        num_workers=workers,
        pin_memory=task.plan.device == "cuda",
        persistent_workers=workers > 0,
        prefetch_factor=PREFETCH_BATCHES if workers else None,
        worker_init_fn=_init_worker,
        generator=torch.Generator(),
    )


def _identity(batch: Any) -> Any:
    """A key's batch is whole already; without this DataLoader would look for tensors in it."""
    return batch


def _init_worker(_: int) -> None:
    """A loader worker ends with its rank at once, and leaves the other cores alone."""
    die_with_parent()
    torch.set_num_threads(1)
