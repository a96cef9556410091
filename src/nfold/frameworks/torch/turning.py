"""Experiments that take turns in one run of a workload: what they change, and when.

The source of the batches brings them about: it is asked for the next batch between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import nn

from nfold.ablation import Variant
from nfold.frameworks.base import Task
from nfold.frameworks.left_out import ActiveVariant
from nfold.frameworks.torch import ablate, batch_norm
from nfold.frameworks.torch.batch import Batch, InputSamples, Tensors
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.source import BatchSource
from nfold.frameworks.torch.step import TrainingStep
from nfold.frameworks.turning import Interleaver, task_length
from nfold.turns import communication_key


class VariantSwitch:
    """Everything but the input that a turn changes in a training."""

    def __init__(self, module: nn.Module, step: TrainingStep) -> None:
        self._batch_norm = batch_norm.BatchNormSwitch(module)
        self._step = step
        self._threads = torch.get_num_threads()

    def __call__(self, variant: Variant) -> None:
        """Leave this out, from the next step on."""
        self._batch_norm(synchronized=variant.synchronised_batch_norm)
        self._step.switch_exchange(communication_key(variant))
        threads = variant.threads or self._threads
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)


class InterleavedSource:
    """The batches of all turns: of each the input that it is to have, while the others stand still.

    ``settled`` is called when the warm-up is over, before the first turn.
    """

    def __init__(
        self,
        source: BatchSource,
        task: Task,
        devices: Devices,
        active_variant: ActiveVariant,
        interleaver: Interleaver,
        on_warmup_end: Callable[[], None],
    ) -> None:
        kinds = {one.input for one in active_variant.interleaved}
        self._real = source
        self._replays = ablate.build_replays(source, kinds, devices)
        self._active_variant = active_variant
        self._interleaver = interleaver
        self._on_warmup_end = on_warmup_end
        self._warmup = task_length(task).warmup
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
        self._on_warmup_end()
        made = self._warmup
        while not self._interleaver.is_finished:
            steps = self._interleaver.begin_slot(made)
            yield from islice(again.get(self._active_variant.current.input, real), steps)
            made += steps

    def unpack(self, tensors: Tensors) -> InputSamples:
        """As the real input's."""
        return self._real.unpack(tensors)
