"""Experiments that take turns in one run of a workload: what they change, and when.

The source of the batches brings them about: it is asked for the next batch between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import nn

from nfold.ablation import Ablation
from nfold.frameworks.base import Task
from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.torch import ablate, batch_norm
from nfold.frameworks.torch.batch import Batch, Given, Tensors
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.source import Source
from nfold.frameworks.torch.step import Step
from nfold.frameworks.turning import Turning, length_of
from nfold.turns import exchanged


class Switches:
    """Everything but the input that a turn changes in a training."""

    def __init__(self, module: nn.Module, step: Step) -> None:
        self._batch_norm = batch_norm.Switch(module)
        self._step = step
        self._threads = torch.get_num_threads()

    def __call__(self, now: Ablation) -> None:
        """Leave this out, from the next step on."""
        self._batch_norm(synchronised=now.synchronised_batch_norm)
        self._step.switch(exchanged(now))
        threads = now.threads or self._threads
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)


class Turned:
    """The batches of all turns: of each the input that it is to have, while the others stand still.

    ``settled`` is called when the warm-up is over, before the first turn.
    """

    def __init__(
        self,
        source: Source,
        task: Task,
        devices: Devices,
        left_out: LeftOut,
        turning: Turning,
        settled: Callable[[], None],
    ) -> None:
        kinds = {one.input for one in left_out.turns}
        self._real = source
        self._replays = ablate.replays(source, kinds, devices)
        self._left_out = left_out
        self._turning = turning
        self._settled = settled
        self._warmup = length_of(task).warmup
        self.epoch = source.epoch

    @property
    def data_bytes(self) -> int:
        """Of all that stays on the device."""
        return sum(source.data_bytes for source in (self._real, *self._replays.values()))

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """Those of the real input."""
        return self._real.notes

    def __len__(self) -> int:
        return len(self._real)

    def __iter__(self) -> Iterator[Batch]:
        self._real.epoch = self.epoch
        real = iter(self._real)
        again = {kind: iter(source) for kind, source in self._replays.items()}
        yield from islice(real, self._warmup)
        self._settled()
        made = self._warmup
        while not self._turning.over:
            steps = self._turning.begin(made)
            yield from islice(again.get(self._left_out.now.input, real), steps)
            made += steps

    def unpack(self, tensors: Tensors) -> Given:
        """As the real input's."""
        return self._real.unpack(tensors)
