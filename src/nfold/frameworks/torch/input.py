"""Input from the host: the samples of a rank in each step, loaded by worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from nfold.data.arrays import Arrays
from nfold.frameworks import stream
from nfold.frameworks.base import Task
from nfold.frameworks.stream import Ids, sample_hash
from nfold.frameworks.torch.augment import Augment
from nfold.frameworks.torch.batch import Batch, Boxed, Given, Samples, Tensors
from nfold.frameworks.torch.prefetch import Land, copied, on_device
from nfold.lifeline import die_with_parent
from nfold.plan import LOADER_AHEAD, USED_UP, Plan

MOST_READY = 0.1
"""The part of the timed steps whose input may lie ready before they begin."""


@dataclass(frozen=True)
class Key:
    """One rank's part of one global batch: sample ids, and how many count (the rest pad)."""

    epoch: int
    ids: Ids
    count: int
    global_count: int


class Stream(stream.Stream, Sampler[Key]):
    """The keys of one rank, epoch by epoch, or without end across epochs."""

    def __init__(self, samples: int, task: Task, *, limit: int | None = None) -> None:
        stream.Stream.__init__(
            self, samples, task.plan, rank=task.rank, ranks=task.world_size, limit=limit
        )

    def __iter__(self) -> Iterator[Key]:
        for epoch, cuts in self.passes():
            order = self.order(epoch)
            for cut in cuts:
                yield Key(epoch, order[cut.places], cut.count, cut.global_count)


class Batches(Dataset[Batch]):
    """Whole batches by key: gathered and hashed in one go, in a loader worker.

    ``augment`` is applied there too; without it the ids go with the images, so that they are
    augmented on the device.
    """

    def __init__(self, arrays: Arrays, augment: Augment | None) -> None:
        self._images = arrays.train_images
        self._labels = arrays.train_labels
        self._finish = partial(_augmented, augment) if augment else _raw

    def __getitem__(self, key: Key) -> Batch:
        ids = torch.from_numpy(key.ids)
        images, ids = self._finish(torch.from_numpy(self._images[key.ids]), ids, key.epoch)
        return Batch(
            tensors=(images, torch.from_numpy(self._labels[key.ids]), ids),
            epoch=key.epoch,
            count=key.count,
            global_count=key.global_count,
            sample_hash=sample_hash(key.ids[: key.count]),
        )


def _augmented(augment: Augment, images: Tensor, ids: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
    """No ids go along: nothing is left to draw, and every tensor costs its way to the device."""
    return augment(images, ids, epoch), torch.empty(0, dtype=torch.int64)


def _raw(images: Tensor, ids: Tensor, _epoch: int) -> tuple[Tensor, Tensor]:
    return images, ids


class Loaded:
    """Batches from a DataLoader, on the device; iterate once an epoch, after setting ``epoch``."""

    def __init__(
        self,
        batches: Dataset[Batch],
        task: Task,
        stream: Stream,
        device: torch.device,
        land: Land = copied,
        notes: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._stream = stream
        self._loader = loader(batches, task, stream)
        self._device = device
        self.land = land
        self._notes = (*notes, *ready_before(task.plan))

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is."""
        return self._stream.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._stream.epoch = epoch

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
        return self._stream.steps_per_epoch

    def on_host(self) -> Iterator[Batch]:
        """The batches as the loader gives them, not yet on the device."""
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._stream)

    def __iter__(self) -> Iterator[Batch]:
        return iter(on_device(self._loader, self._device, self.land))

    def unpack(self, tensors: Tensors) -> Given:
        """The samples, which the tensors are."""
        return Samples(*tensors) if len(tensors) == len(Samples._fields) else Boxed(*tensors)


def ready_before(plan: Plan) -> tuple[tuple[str, str], ...]:
    """A doubt where a run and its warm-up are too short to show how fast its workers are.

    While the first steps are compiled and warm up, workers fill their queues; timed steps that
    take from there wait for nobody.
    """
    ready, steps = LOADER_AHEAD * (plan.workers or 0), plan.steps
    used = (plan.warmup_steps or 0) >= USED_UP * ready
    if steps is None or ready <= MOST_READY * steps or used:
        return ()
    text = (
        f"the workers may have had {ready} batches ready when the {steps} timed steps began: they "
        f"show what the devices can take; next: --steps {round(ready / MOST_READY)} for the workers"
    )
    return (("queued_input", text),)


def loader(batches: Dataset[Batch], task: Task, stream: Stream) -> DataLoader[Batch]:
    """A DataLoader over ``stream``: persistent workers, batches made ahead, pinned for GPUs.

    It seeds its workers from a generator of its own: how often it does depends on where a
    resumed run began, and dropout draws from the default one.
    """
    workers = task.plan.workers or 0
    return DataLoader(
        batches,
        batch_size=None,
        sampler=stream,
        collate_fn=_unchanged,
        num_workers=workers,
        pin_memory=task.plan.device == "cuda",
        persistent_workers=workers > 0,
        prefetch_factor=LOADER_AHEAD if workers else None,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),
    )


def _unchanged(batch: Any) -> Any:
    """A key's batch is whole already; without this DataLoader would look for tensors in it."""
    return batch


def _start_worker(_: int) -> None:
    """A loader worker ends with its rank at once, and leaves the other cores alone."""
    die_with_parent()
    torch.set_num_threads(1)
