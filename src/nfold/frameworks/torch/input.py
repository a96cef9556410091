"""Input: which samples a rank gets in each step, loaded and augmented by worker processes.

The order of samples depends on (seed, epoch) alone. Every global batch is cut into one
contiguous slice per rank, the slices differing by at most one sample, so that a batch that
does not divide and an incomplete last batch are used whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from nfold.data.arrays import Arrays
from nfold.frameworks.base import Task
from nfold.frameworks.torch.augment import SHUFFLE, augment
from nfold.frameworks.torch.philox import permutation
from nfold.lifeline import die_with_parent

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Key:
    """One rank's part of one global batch: sample ids, and how many count (the rest pad)."""

    epoch: int
    ids: Ids
    count: int
    global_count: int


@dataclass(frozen=True)
class Batch:
    """A rank's part of a global batch: uint8 images [n, h, w, c], int64 labels [n].

    ``count`` of them are this rank's samples, of ``global_count`` in the step; a rank without
    a sample gets one that counts 0, because every rank must take part in the exchange.
    ``weight`` makes the mean over ranks of weighted local means the mean over the batch.
    """

    images: Tensor
    labels: Tensor
    count: int
    global_count: int
    sample_hash: int

    def weight(self, world_size: int) -> float:
        """1 where every rank has the same share."""
        return self.count * world_size / self.global_count

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory; DataLoader calls this."""
        return Batch(
            self.images.pin_memory(),
            self.labels.pin_memory(),
            self.count,
            self.global_count,
            self.sample_hash,
        )


class Stream(Sampler[Key]):
    """The keys of one rank, epoch by epoch, or without end across epochs."""

    def __init__(self, samples: int, task: Task, *, limit: int | None = None) -> None:
        self._samples = samples
        self._batch = cast(int, task.plan.batch)
        self._seed = task.plan.seed
        self._rank = task.rank
        self._ranks = task.world_size
        self._limit = limit
        self.epoch = 0

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one epoch, the incomplete last batch counted."""
        return math.ceil(self._samples / self._batch)

    def __len__(self) -> int:
        return self._limit or self.steps_per_epoch

    def __iter__(self) -> Iterator[Key]:
        if self._limit is None:
            yield from self._keys(self.epoch)
            return
        for step in range(self._limit):
            epoch, index = divmod(step, self.steps_per_epoch)
            if index == 0:
                keys = self._keys(epoch)
            yield next(keys)

    def _keys(self, epoch: int) -> Iterator[Key]:
        order = permutation(self._seed, epoch, self._samples, SHUFFLE).numpy()
        for start in range(0, self._samples, self._batch):
            whole = order[start : start + self._batch]
            own = share(whole, self._rank, self._ranks)
            yield Key(epoch, own if len(own) else whole[:1], len(own), len(whole))


def share(ids: Ids, rank: int, ranks: int) -> Ids:
    """The contiguous part of ``ids`` that belongs to a rank; parts differ by at most one."""
    n = len(ids)
    return ids[rank * n // ranks : (rank + 1) * n // ranks]


class Batches(Dataset[Batch]):
    """Whole batches by key: gathered, augmented and hashed in one go, in a loader worker."""

    def __init__(self, arrays: Arrays, task: Task, operations: tuple[tuple[str, int], ...]) -> None:
        self._images = arrays.train_images
        self._labels = arrays.train_labels
        self._seed = task.plan.seed
        self._operations = operations

    def __getitem__(self, key: Key) -> Batch:
        ids = torch.from_numpy(key.ids)
        images = torch.from_numpy(self._images[key.ids])
        labels = torch.from_numpy(self._labels[key.ids])
        images = augment(images, ids, self._seed, key.epoch, self._operations)
        hashed = sample_hash(key.ids[: key.count])
        return Batch(images, labels, key.count, key.global_count, hashed)


def sample_hash(ids: Ids) -> int:
    """A 64-bit hash of a set of sample ids that does not depend on their order (splitmix64)."""
    mixed = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


def loader(
    arrays: Arrays, task: Task, operations: tuple[tuple[str, int], ...], stream: Stream
) -> DataLoader[Batch]:
    """A DataLoader over ``stream``: persistent workers, four batches ahead, pinned for GPUs."""
    workers = task.plan.workers or 0
    return DataLoader(
        Batches(arrays, task, operations),
        batch_size=None,
        sampler=stream,
        collate_fn=_unchanged,
        num_workers=workers,
        pin_memory=task.plan.device == "cuda",
        persistent_workers=workers > 0,
        prefetch_factor=4 if workers else None,
        worker_init_fn=_start_worker,
    )


def _unchanged(batch: Any) -> Any:
    """A key's batch is whole already; without this DataLoader would look for tensors in it."""
    return batch


def _start_worker(_: int) -> None:
    """A loader worker ends with its rank at once, and leaves the other cores alone."""
    die_with_parent()
    torch.set_num_threads(1)
