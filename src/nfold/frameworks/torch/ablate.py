"""What experiments put in place of parts of a training. Where nothing is left out, no-ops.

Which one is taken is decided once, before the first step; no step asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import cycle, islice

import torch

from nfold.frameworks.base import Task
from nfold.frameworks.torch import parallel
from nfold.frameworks.torch.batch import Batch, Given, Tensors
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.input import Loaded
from nfold.frameworks.torch.prefetch import on_device
from nfold.frameworks.torch.source import Source

WHOLE_EPOCH, SOME = 64, 16
"""Batches that are replayed: all of an epoch of up to so many, else the first ones."""


def replayed(source: Source, task: Task, devices: Devices) -> Source:
    """The source, or its first batches again and again, from the host or from the device."""
    kind = task.left_out.input
    return replays(source, {kind}, devices).get(kind, source)


def replays(source: Source, kinds: Set[str], devices: Devices) -> dict[str, Source]:
    """For each of these kinds of input but the real one, what gives the same first batches again.

    None for data that are on the device already.
    """
    wanted = sorted(kinds - {"real"})
    if not wanted or not isinstance(source, Loaded):
        return {}
    steps = source.steps_per_epoch
    first = list(islice(source.on_host(), steps if steps <= WHOLE_EPOCH else SOME))
    return {
        kind: Replayed(source, first, devices.primary, resident=kind == "resident")
        for kind in wanted
    }


class Replayed:
    """A loader's ``first`` batches, over and over, as many as it would have given."""

    def __init__(
        self, loaded: Loaded, first: Sequence[Batch], device: torch.device, *, resident: bool
    ) -> None:
        self._batches = [loaded.land(batch, device) for batch in first] if resident else first
        self._device = None if resident else device
        self._loaded = loaded
        self.epoch = 0

    @property
    def data_bytes(self) -> int:
        """Of the batches, where they stay on the device."""
        held = self._batches if self._device is None else []
        return sum(tensor.nbytes for batch in held for tensor in batch.tensors)

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """None."""
        return ()

    def __len__(self) -> int:
        return len(self._loaded)

    def __iter__(self) -> Iterator[Batch]:
        again = islice(cycle(self._batches), len(self))
        return iter(
            again if self._device is None else on_device(again, self._device, self._loaded.land)
        )

    def unpack(self, tensors: Tensors) -> Given:
        """As the loader's."""
        return self._loaded.unpack(tensors)


def begin_together(task: Task) -> None:
    """Let ranks that do not wait for each other at least begin at the same time.

    Sets the threads that an experiment asks for, too.
    """
    left_out = task.left_out
    if left_out.threads is not None:
        torch.set_num_threads(left_out.threads)
    if not left_out.coupled:
        parallel.barrier(task.world_size)
