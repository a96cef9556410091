"""What inputs whose samples lie on devices have in common: the order of epochs, made ahead.

Samples, order, slices, weights and hashes are the stream's, the same as a loader's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nfold.frameworks.stream import RankSlice, SampleIds, hash_ids
from nfold.frameworks.torch.batch import Batch, SampleTensors, Tensors
from nfold.frameworks.torch.input import BatchKeySampler

CHUNK_BYTES = 2**26
"""Copied at a time: a data set that is a memory map need not fit into the host's memory."""
Route = TypeVar("Route")
"""What the host works out for all steps of an epoch before it begins."""


class EpochPrefetcher(Generic[Route]):
    """What ``make`` gives for an epoch; that of the next one is made by a thread meanwhile."""

    def __init__(self, make: Callable[[int], Route]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="order")
        self._begun: dict[int, Future[Route]] = {}
        self._begin(0)

    def get(self, epoch: int) -> Route:
        """That of ``epoch``; the one after it is begun."""
        self._begin(epoch)
        wanted = self._begun.pop(epoch)
        self._begin(epoch + 1)
        return wanted.result()

    def _begin(self, epoch: int) -> None:
        """Let the thread make that of ``epoch``, unless it does already."""
        if epoch not in self._begun:
            self._begun = {epoch: self._thread.submit(self._make, epoch)}


class DeviceSource(ABC, Generic[Route]):
    """Batches of samples on the device; iterate once an epoch, after setting ``epoch``.

    The next epoch's route is made by a thread while one is trained: 50,000 samples take 22 ms,
    a quarter of an epoch of cnn10 on four H200s.
    """

    def __init__(
        self,
        images: npt.NDArray[np.uint8],
        labels: SampleIds,
        sampler: BatchKeySampler,
        device: torch.device,
    ) -> None:
        self.epoch = 0
        self._sampler = sampler
        self._device = device
        self._images = copy_in_chunks(images, device)
        self._labels = copy_in_chunks(labels, device)
        self._positions = slice_positions(sampler.slices)
        self._offsets = np.cumsum([0, *(len(cut.positions) for cut in sampler.slices)])
        self._prefetcher = EpochPrefetcher(self._build_epoch)

    @abstractmethod
    def build_route(self, order: SampleIds) -> Route:
        """What the batches of an epoch need, from all ranks' samples in its order; in a thread."""

    @abstractmethod
    def batch_tensors(self, route: Route) -> Iterator[Tensors]:
        """The tensors of every batch of an epoch, for ``unpack``."""

    @abstractmethod
    def unpack(self, tensors: Tensors) -> SampleTensors:
        """The samples that a batch's tensors are, or stand for."""

    @property
    def data_bytes(self) -> int:
        """Bytes of the samples on this rank's device."""
        return self._images.nbytes + self._labels.nbytes

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """None."""
        return ()

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        self._sampler.epoch = self.epoch
        for epoch, cuts in self._sampler.epochs():
            yield from self._batches(epoch, cuts)

    def _batches(self, epoch: int, cuts: list[RankSlice]) -> Iterator[Batch]:
        route, hashes = self._prefetcher.get(epoch)
        now = torch.full((), epoch, dtype=torch.int64, device=self._device)
        for cut, tensors, hashed in zip(cuts, self.batch_tensors(route), hashes, strict=False):
            yield Batch(
                tensors=tensors,
                epoch=now,
                count=cut.count,
                global_count=cut.global_count,
                sample_hash=hashed,
            )

    def _build_epoch(self, epoch: int) -> tuple[Route, list[int]]:
        order = self._sampler.epoch_order(epoch)
        return self.build_route(order), self._hashes(order[self._positions])

    def _hashes(self, own: SampleIds) -> list[int]:
        """The sample hash of every step; a sample that pads counts 0 in its sum."""
        counted = np.array([cut.count > 0 for cut in self._sampler.slices], dtype=np.uint64)
        sums: list[int] = (np.add.reduceat(hash_ids(own), self._offsets[:-1]) * counted).tolist()
        return sums


def slice_positions(slices: Sequence[RankSlice]) -> SampleIds:
    """Where a rank's samples lie in the order of an epoch, step after step."""
    return np.concatenate([cut.positions for cut in slices])


def copy_in_chunks(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy of an array on the device, copied in parts."""
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    target = torch.empty(array.shape, dtype=kind, device=device)
    rows = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        part = np.array(array[start : start + rows])
        target[start : start + rows].copy_(torch.from_numpy(part))
    return target


def upload(numbers: SampleIds, device: torch.device) -> Tensor:
    """On a GPU copied from page-locked memory, so that the host does not wait for the step."""
    on_host = torch.from_numpy(numbers)
    if device.type == "cuda":
        return on_host.pin_memory().to(device, non_blocking=True)
    return on_host
