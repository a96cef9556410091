"""Input from the host: which samples a rank gets in each step, loaded by worker processes.

The order of samples depends on (seed, epoch) alone. Every global batch is cut into one
contiguous slice per rank, or one per rank and part of a step, the slices differing by at most
one sample, so that a batch that does not divide and an incomplete last batch are used whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from nfold.data.arrays import Arrays
from nfold.frameworks.base import Task
from nfold.frameworks.torch.augment import SHUFFLE, Augment
from nfold.frameworks.torch.batch import Batch, Samples, Tensors
from nfold.frameworks.torch.parts import pieces
from nfold.frameworks.torch.philox import permutation
from nfold.frameworks.torch.prefetch import on_device
from nfold.lifeline import die_with_parent

Ids = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Key:
    """One rank's part of one global batch: sample ids, and how many count (the rest pad)."""

    epoch: int
    ids: Ids
    count: int
    global_count: int


@dataclass(frozen=True)
class Cut:
    """Where one rank's share of one global batch lies in the order of an epoch, the same in each.

    ``places`` is never empty: a rank without a sample gets the batch's first, of which 0 count.
    """

    places: Ids
    count: int
    global_count: int


class Stream(Sampler[Key]):
    """The keys of one rank, epoch by epoch, or without end across epochs."""

    def __init__(self, samples: int, task: Task, *, limit: int | None = None) -> None:
        batch = cast(int, task.plan.batch)
        starts = range(0, samples, batch)
        self._wholes = [range(start, min(start + batch, samples)) for start in starts]
        self._task = task
        self.cuts = self.cuts_of(task.rank)
        self._samples = samples
        self._seed = task.plan.seed
        self._limit = limit
        self.epoch = 0

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one epoch, the incomplete last batch counted."""
        return len(self.cuts)

    def cuts_of(self, rank: int) -> list[Cut]:
        """A rank's part of every global batch."""
        ranks, parts = self._task.world_size, self._task.plan.accumulate
        return [_cut(whole, rank, ranks, parts) for whole in self._wholes]

    def __len__(self) -> int:
        return self._limit or self.steps_per_epoch

    def __iter__(self) -> Iterator[Key]:
        for epoch, cuts in self.passes():
            order = self.order(epoch)
            for cut in cuts:
                yield Key(epoch, order[cut.places], cut.count, cut.global_count)

    def passes(self) -> Iterator[tuple[int, list[Cut]]]:
        """The epochs that one iteration goes through, the last perhaps not to its end."""
        if self._limit is None:
            yield self.epoch, self.cuts
            return
        for epoch, done in enumerate(range(0, self._limit, self.steps_per_epoch)):
            yield epoch, self.cuts[: self._limit - done]

    def order(self, epoch: int) -> Ids:
        """All ranks' samples in the order of an epoch: int64 [samples]."""
        order: Ids = permutation(self._seed, epoch, self._samples, SHUFFLE).numpy()
        return order


def _cut(whole: range, rank: int, ranks: int, accumulate: int) -> Cut:
    own = pieces(len(whole), rank, ranks, accumulate)
    count = sum(map(len, own))
    places = np.concatenate([np.asarray(piece) for piece in own]) if count else np.zeros(1)
    return Cut(whole.start + places.astype(np.int64), count, len(whole))


def mixed(ids: Ids) -> Hashes:
    """A 64-bit hash of each sample id (splitmix64)."""
    bits = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def sample_hash(ids: Ids) -> int:
    """A 64-bit hash of a set of sample ids that does not depend on their order: their sum."""
    return int(mixed(ids).sum(dtype=np.uint64))


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
            tensors=Samples(images, torch.from_numpy(self._labels[key.ids]), ids),
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
        arrays: Arrays,
        task: Task,
        stream: Stream,
        augment: Augment | None,
        device: torch.device,
    ) -> None:
        self._stream = stream
        self._loader = loader(Batches(arrays, augment), task, stream)
        self._device = device

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
        """None."""
        return ()

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
        return iter(on_device(self._loader, self._device))

    def unpack(self, tensors: Tensors) -> Samples:
        """The samples, which the tensors are."""
        return Samples(*tensors)


def loader(batches: Batches, task: Task, stream: Stream) -> DataLoader[Batch]:
    """A DataLoader over ``stream``: persistent workers, four batches ahead, pinned for GPUs.

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
        prefetch_factor=4 if workers else None,
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
