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


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterable[Batch]:
    """The batches on ``device``; on a CPU device they are there already."""
    if device.type != "cuda":
        return batches
    copies = Copies(device)
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

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, batch: Batch) -> Copying:
        """Start copying; the host's memory stays taken until the copies are done (by PyTorch)."""
        with torch.cuda.stream(self._stream):
            moved = batch.moved(lambda tensor: tensor.to(self._device, non_blocking=True))
            return moved, self._stream.record_event()

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
