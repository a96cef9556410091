"""Batches on the device: on a GPU copied one ahead, beside the step, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

import torch
from torch import Tensor

from nfold.frameworks.torch.batch import Batch

Item = TypeVar("Item")
Pending = TypeVar("Pending")
ToDevice = Callable[[Batch, torch.device], Batch]
"""What queues everything that brings a batch to the device, on the current stream."""


def copy_batch(batch: Batch, device: torch.device) -> Batch:
    """The same batch on ``device``; on a CPU device it is there already."""
    if device.type != "cuda":
        return batch
    return batch.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))


def prefetch_batches(
    batches: Iterable[Batch], device: torch.device, to_device: ToDevice = copy_batch
) -> Iterable[Batch]:
    """The batches as ``land`` brings them to ``device``."""
    return prefetch_items(
        batches, device, lambda batch: to_device(batch, device), lambda batch: batch.tensors
    )


def prefetch_items(
    items: Iterable[Item],
    device: torch.device,
    to_device: Callable[[Item], Item],
    tensors: Callable[[Item], Iterable[Tensor]],
) -> Iterable[Item]:
    """The items as ``land`` brings them to ``device``; ``tensors`` are those of one there."""
    if device.type != "cuda":
        return map(to_device, items)
    copies = CopyStream(device, to_device, tensors)
    return one_ahead(items, copies.begin, copies.finish)


def one_ahead(
    items: Iterable[Item], begin: Callable[[Item], Pending], finish: Callable[[Pending], Item]
) -> Iterator[Item]:
    """Every item through ``begin`` and ``finish``; the next one begins before one is given out."""
    remaining = iter(items)
    begun = [begin(item) for item in islice(remaining, 1)]
    for item in remaining:
        begun.append(begin(item))
        yield finish(begun.pop(0))
    for last in begun:
        yield finish(last)


class CopyStream(Generic[Item]):
    """Copies from page-locked memory on a side stream; the step's stream waits, not the host.

    ``land`` and ``tensors`` are as for ``brought``.
    """

    def __init__(
        self,
        device: torch.device,
        to_device: Callable[[Item], Item],
        tensors: Callable[[Item], Iterable[Tensor]],
    ) -> None:
        self._device = device
        self._to_device = to_device
        self._tensors = tensors
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, item: Item) -> tuple[Item, torch.cuda.Event]:
        """Start copying; returns the item on the device and the event after its copies.

        The host's memory stays taken until they are done (by PyTorch).
        """
        with torch.cuda.stream(self._stream):
            return self._to_device(item), self._stream.record_event()

    def finish(self, copying: tuple[Item, torch.cuda.Event]) -> Item:
        """Let the current stream wait for the copies, and keep their memory until it is through.

        Without ``record_stream`` the allocator would give the memory, which belongs to the side
        stream, to the next copy as soon as Python forgets the item, while the step still reads.
        """
        item, copied = copying
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        for tensor in self._tensors(item):
            if tensor.is_cuda:
                tensor.record_stream(current)
        return item
