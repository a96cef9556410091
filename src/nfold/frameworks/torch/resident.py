"""Resident input: the training set on the device, copied once; a step only selects from it.

Nothing is loaded while training: the order of an epoch is one tensor, copied to the device at
the epoch's start, of which every step takes the next part. Samples, order, slices, weights and
hashes are the stream's, the same as a loader's.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nfold.data.arrays import Arrays
from nfold.errors import OutOfMemory
from nfold.frameworks.torch.batch import Batch, Samples, Tensors
from nfold.frameworks.torch.input import Cut, Ids, Stream, mixed

MOST_OF_FREE = 0.8
"""The part of a device's free memory that a data set may take; the rest is for the training."""
CHUNK_BYTES = 2**26
"""Copied at a time: a data set that is a memory map need not fit into the host's memory."""

Order = tuple[Ids, list[int]]
"""A rank's samples of an epoch, step after step, and the sample hash of each step."""


def check_fits(needed_bytes: int, free_bytes: int, where: str) -> None:
    """Raise OutOfMemory where a data set would take more than MOST_OF_FREE of what is free."""
    if needed_bytes > MOST_OF_FREE * free_bytes:
        raise OutOfMemory(
            f"input 'resident' needs {_gib(needed_bytes)} on {where}, of whose free "
            f"{_gib(free_bytes)} it may take {MOST_OF_FREE:.0%}; next: --input loader"
        )


def data_bytes(arrays: Arrays) -> int:
    """Bytes of the training images and labels."""
    return arrays.train_images.nbytes + arrays.train_labels.nbytes


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"


class Resident:
    """Batches selected on the device; iterate once an epoch, after setting ``epoch``.

    The next epoch's order is made by a thread while one is trained: 50,000 samples take 22 ms,
    a quarter of an epoch of cnn10 on four H200s.
    """

    def __init__(self, arrays: Arrays, stream: Stream, device: torch.device) -> None:
        self.epoch = 0
        self._stream = stream
        self._device = device
        self._images = placed(arrays.train_images, device)
        self._labels = placed(arrays.train_labels, device)
        self._positions = np.concatenate([cut.places for cut in stream.cuts])
        self._offsets = np.cumsum([0, *(len(cut.places) for cut in stream.cuts)])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="order")
        self._orders: dict[int, Future[Order]] = {}
        self._begin(0)

    def __len__(self) -> int:
        return len(self._stream)

    def __iter__(self) -> Iterator[Batch]:
        self._stream.epoch = self.epoch
        for epoch, cuts in self._stream.passes():
            yield from self._batches(epoch, cuts)

    def unpack(self, tensors: Tensors) -> Samples:
        """The samples whose ids [n] the tensors are, selected on the device; nothing waits."""
        (ids,) = tensors
        return Samples(self._images.index_select(0, ids), self._labels.index_select(0, ids), ids)

    def _batches(self, epoch: int, cuts: list[Cut]) -> Iterator[Batch]:
        order, hashes = self._take(epoch)
        ids = _copied(order, self._device)
        now = torch.full((), epoch, dtype=torch.int64, device=self._device)
        for cut, start, hashed in zip(cuts, self._offsets, hashes, strict=False):
            yield Batch(
                tensors=(ids[start : start + len(cut.places)],),
                epoch=now,
                count=cut.count,
                global_count=cut.global_count,
                sample_hash=hashed,
            )

    def _take(self, epoch: int) -> Order:
        """The order of ``epoch``; the one after it is begun."""
        self._begin(epoch)
        wanted = self._orders.pop(epoch)
        self._begin(epoch + 1)
        return wanted.result()

    def _begin(self, epoch: int) -> None:
        """Let the thread make the order of ``epoch``, unless it does already."""
        if epoch not in self._orders:
            self._orders = {epoch: self._thread.submit(self._order, epoch)}

    def _order(self, epoch: int) -> Order:
        own = self._stream.order(epoch)[self._positions]
        return own, self._hashes(own)

    def _hashes(self, own: Ids) -> list[int]:
        """The sample hash of every step; a sample that pads counts 0 in its sum."""
        counted = np.array([cut.count > 0 for cut in self._stream.cuts], dtype=np.uint64)
        sums: list[int] = (np.add.reduceat(mixed(own), self._offsets[:-1]) * counted).tolist()
        return sums


def placed(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy of an array on the device, copied in parts."""
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    target = torch.empty(array.shape, dtype=kind, device=device)
    rows = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        part = np.array(array[start : start + rows])
        target[start : start + rows].copy_(torch.from_numpy(part))
    return target


def _copied(order: Ids, device: torch.device) -> Tensor:
    """On a GPU copied from page-locked memory, so that the host does not wait for the step."""
    on_host = torch.from_numpy(order)
    if device.type == "cuda":
        return on_host.pin_memory().to(device, non_blocking=True)
    return on_host
