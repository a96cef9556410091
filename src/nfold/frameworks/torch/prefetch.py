"""Batches on the device: on a GPU copied one ahead, beside the step, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

import torch

from nfold.frameworks.torch.batch import Batch

Item = TypeVar("Item")
Begun = TypeVar("Begun")
Copying = tuple[Batch, torch.cuda.Event]
"""A batch on the device whose copies may be under way, and the event after them."""
Land = Callable[[Batch, torch.device], Batch]
"""What queues everything that brings a batch to the device, on the current stream."""


def copied(batch: Batch, device: torch.device) -> Batch:
    """The same batch on ``device``; on a CPU device it is there already."""
    if device.type != "cuda":
        return batch
    return batch.moved(lambda tensor: tensor.to(device, non_blocking=True))


def on_device(
    batches: Iterable[Batch], device: torch.device, land: Land = copied
) -> Iterable[Batch]:
    """The batches as ``land`` brings them to ``device``."""
    if device.type != "cuda":
        return (land(batch, device) for batch in batches)
    copies = Copies(device, land)
    return one_ahead(batches, copies.begin, copies.finish)


def one_ahead(
    items: Iterable[Item], begin: Callable[[Item], Begun], finish: Callable[[Begun], Item]
) -> Iterator[Item]:
    """Every item through ``begin`` and ``finish``; the next one begins before one is given out."""
    remaining = iter(items)
    begun = [begin(item) for item in islice(remaining, 1)]
    for item in remaining:
        begun.append(begin(item))
        yield finish(begun.pop(0))
    for last in begun:
        yield finish(last)


class Copies:
    """Copies from page-locked memory on a side stream; the step's stream waits, not the host."""

    def __init__(self, device: torch.device, land: Land = copied) -> None:
        self._device = device
        self._land = land
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, batch: Batch) -> Copying:
        """Start copying; the host's memory stays taken until the copies are done (by PyTorch)."""
        with torch.cuda.stream(self._stream):
            return self._land(batch, self._device), self._stream.record_event()

    def finish(self, copying: Copying) -> Batch:
        """Let the current stream wait for the copies, and keep their memory until it is through.

        Without ``record_stream`` the allocator would give the memory, which belongs to the side
        stream, to the next copy as soon as Python forgets the batch, while the step still reads.
        """
        batch, copied = copying
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        for tensor in batch.tensors:
            tensor.record_stream(current)
        return batch
