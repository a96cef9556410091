"""What experiments put in place of parts of a training. Where nothing is left out, no-ops.

Which one is taken is decided once, before the first step; no step asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import cycle, islice

import torch

from nfold.frameworks.base import Task
from nfold.frameworks.torch import parallel
from nfold.frameworks.torch.batch import Batch, InputSamples, Tensors
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.input import LoaderSource
from nfold.frameworks.torch.prefetch import prefetch_batches
from nfold.frameworks.torch.source import BatchSource

MAX_WHOLE_EPOCH, REPLAYED_BATCHES = 64, 16
"""Batches that are replayed: all of an epoch of up to so many, else the first ones."""


def replay_source(source: BatchSource, task: Task, devices: Devices) -> BatchSource:
    """The source, or its first batches again and again, from the host or from the device."""
    kind = task.variant.input
    return build_replays(source, {kind}, devices).get(kind, source)


def build_replays(source: BatchSource, kinds: Set[str], devices: Devices) -> dict[str, BatchSource]:
    """For each of these kinds of input but the real one, what gives the same first batches again.

    None for data that are on the device already.
    """
    wanted = sorted(kinds - {"real"})
    if not wanted or not isinstance(source, LoaderSource):
        return {}
    steps = source.steps_per_epoch
    first = list(
        islice(source.host_batches(), steps if steps <= MAX_WHOLE_EPOCH else REPLAYED_BATCHES)
    )
    return {
        kind: ReplayedSource(source, first, devices.primary, resident=kind == "resident")
        for kind in wanted
    }


class ReplayedSource:
    """A loader's ``first`` batches, over and over, as many as it would have given."""

    def __init__(
        self,
        source: LoaderSource,
        batches: Sequence[Batch],
        device: torch.device,
        *,
        resident: bool,
    ) -> None:
        self._batches = (
            [source.to_device(batch, device) for batch in batches] if resident else batches
        )
        self._device = None if resident else device
        self._source = source
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
        return len(self._source)

    def __iter__(self) -> Iterator[Batch]:
        again = islice(cycle(self._batches), len(self))
        return iter(
            again
            if self._device is None
            else prefetch_batches(again, self._device, self._source.to_device)
        )

    def unpack(self, tensors: Tensors) -> InputSamples:
        """As the loader's."""
        return self._source.unpack(tensors)


def synchronize_start(task: Task) -> None:
    """Let ranks that do not wait for each other at least begin at the same time.

    Sets the threads that an experiment asks for, too.
    """
    left_out = task.variant
    if left_out.threads is not None:
        torch.set_num_threads(left_out.threads)
    if not left_out.ranks_synchronize:
        parallel.barrier(task.world_size)
