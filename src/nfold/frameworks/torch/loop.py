"""Training: one rank of one plan, from opening its devices to its samples.

Observation wraps the step and is left out by passing nothing to observe with.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import closing
from typing import cast

import torch
from torch import Tensor, nn

from nfold.frameworks.base import Observer, Task
from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.length import steps_of
from nfold.frameworks.recording import Recorder
from nfold.frameworks.torch import ablate, batch_norm, layout, parallel
from nfold.frameworks.torch.ablation import Renamed, seen
from nfold.frameworks.torch.batch import Batch
from nfold.frameworks.torch.capturable import make_capturable
from nfold.frameworks.torch.capture import WARM_UP
from nfold.frameworks.torch.chain import Chain, chains
from nfold.frameworks.torch.clock import clock
from nfold.frameworks.torch.definition import Definition, check_alike, definition
from nfold.frameworks.torch.devices import Devices, open_devices
from nfold.frameworks.torch.evaluate import evaluate
from nfold.frameworks.torch.few_channels import as_products
from nfold.frameworks.torch.forward import Way, compiled, pieces_of, written
from nfold.frameworks.torch.images import normalizer
from nfold.frameworks.torch.keeping import State, keeper
from nfold.frameworks.torch.observe import losses_of
from nfold.frameworks.torch.parts import Parts, cut
from nfold.frameworks.torch.precision import Precision
from nfold.frameworks.torch.rate import Fixed, OneCycle
from nfold.frameworks.torch.share import Ledger
from nfold.frameworks.torch.source import (
    Source,
    photo_preparation,
    photo_source,
    preparation,
    source,
)
from nfold.frameworks.torch.step import Now, Update, step
from nfold.frameworks.torch.translate import translated
from nfold.frameworks.torch.turning import Switches, Turned
from nfold.frameworks.torch.weights import checksum_of
from nfold.frameworks.turning import Turning, length_of
from nfold.measurement import Epoch, RankSamples

Define = Callable[[Task], Definition]
"""What a task trains."""


def train(task: Task, observer: Observer, define: Define = definition) -> RankSamples:
    """Run one rank to its end; raises OutOfMemory, Diverged or Collateral, or what the user's
    own code raises.
    """
    own = seen(task)
    devices = open_devices(own)
    with (
        translated(devices.peak_memory_bytes),
        parallel.joined(task, devices),
        closing(Trainer(own, devices, define)) as trainer,
    ):
        ablate.begin_together(task)
        samples = trainer.run(observer if own.rank == task.rank else Renamed(observer, task.rank))
        return dataclasses.replace(samples, rank=task.rank)


class Trainer:
    """A model, its data and its step on this rank's devices."""

    def __init__(self, task: Task, devices: Devices, define: Define = definition) -> None:
        self.task = task
        self.devices = devices
        self.left_out = LeftOut(task)
        self.made = define(task)
        check_alike(self.made, task, devices.primary)
        arrays = self.made.arrays
        self.precision = Precision(cast(str, task.plan.precision), devices.primary)
        self.normalize = normalizer(arrays, cast(str, task.plan.layout), devices.primary)
        self._place_input()
        self._now = Now(devices.primary)
        self._build()

    def _place_input(self) -> None:
        """Where batches come from, and what the device still does to them."""
        made, task, devices = self.made, self.task, self.devices
        batches: Source
        if made.photographs is not None:
            batches = photo_source(made.photographs, made.arrays, task, devices)
            self.prepare = photo_preparation(made.arrays, task, self.normalize, devices)
        else:
            operations = made.operations if task.left_out.augmentation else ()
            batches = source(made.arrays, task, operations, devices)
            self.prepare = preparation(made.arrays, task, operations, self.normalize, devices)
        self.source = ablate.replayed(batches, task, devices)

    def _build(self) -> None:
        """The same weights on every rank; after them, draws of its own (dropout) on each."""
        module = self.made.model.to(self.devices.primary)
        self.module: nn.Module = layout.place(module, cast(str, self.task.plan.layout))
        self.optimizer = self.made.optimizer(self.module)
        self._fit_for_graphs()
        torch.manual_seed(self.task.plan.seed + 1 + self.task.rank)
        plan, pieces = self.task.plan, pieces_of(self.module, self.task)
        ledger = Ledger(self.task.world_size)
        batch_norm.synchronise(self.module, plan, ledger)
        as_products(self.module, plan)
        self.model = parallel.wrapped(
            self.module, self.task, self.devices, ledger, self.optimizer, pieces, self.left_out
        )
        way = Way(self.source.unpack, self.prepare, self.made.loss, self.precision)
        rare = usual = written(way, self.model)
        if "compiled" in cast(str, plan.step):
            usual = compiled(way, pieces, tuned=plan.kernels == "tuned")
        largest = min(cast(int, plan.batch), len(self.made.arrays.train_labels))
        usual_sizes = {part.rows for part in self._parts(largest)}
        turn = parallel.turns(self.model, ledger)
        self.rate = self._rate(self.made.peak)
        update = Update(usual, rare, usual_sizes, self.precision, self.optimizer, turn, self.rate)
        self._step = step(cast(str, plan.step), update, self.rate, self.devices.primary)
        self.keeper = keeper(self.task, State(self.module, self.optimizer, self.precision.scaler))
        self._agreed: str | None = None

    def _fit_for_graphs(self) -> None:
        """Let a user's own optimizer step inside a graph, where there is one."""
        if self.task.workload.reference and "captured" in cast(str, self.task.plan.step):
            make_capturable(self.optimizer, self.devices.primary)

    def _rate(self, peak: float) -> Fixed:
        steps = (self.task.plan.epochs or 1) * len(self.source)
        return OneCycle(self.optimizer, peak, steps, self.devices.primary) if peak else Fixed()

    def step(self, batch: Batch) -> Tensor:
        """One optimizer update; returns the mean loss over this rank's samples, not yet read."""
        return self._step(batch.tensors, self._now(batch.epoch), self._parts(batch.global_count))

    def steps(self, batches: Chain, first: int) -> Tensor:
        """One update for each batch, which are alike, from step number ``first`` on; losses."""
        if len(batches) == 1:
            self.rate.at(first)
            return self.step(batches[0])
        head, rates = batches[0], self.rate.of(first, len(batches))
        parts = self._parts(head.global_count)
        tensors = [batch.tensors for batch in batches]
        return self._step.several(tensors, self._now(head.epoch), parts, rates)

    def _parts(self, samples: int) -> Parts:
        """This rank's parts of a global batch."""
        task = self.task
        return cut(samples, task.rank, task.world_size, task.plan.accumulate)

    def close(self) -> None:
        """Give back what would keep the process group from ending."""
        self._step.close()

    def run(self, observer: Observer) -> RankSamples:
        """All steps of the plan, observed."""
        earlier = self.keeper.resume()
        self._fit_for_graphs()
        done, steps = len(earlier.epochs), len(self.source)
        epochs = range(done, self.task.plan.epochs or 1)
        if self.task.turns:
            length = length_of(self.task)
        else:
            length = steps_of(self.task.plan, len(epochs) * steps, done * steps)
        timer, device = clock(self.devices), self.devices.describe()
        recorder = Recorder(self.task.rank, device, timer, observer, length, losses_of)
        recorder.go_on(earlier)
        self._take_turns(recorder, observer)
        for epoch in epochs:
            self._epoch(epoch, recorder)
        return recorder.samples(
            peak_memory_bytes=self.devices.peak_memory_bytes(),
            reserved_memory_bytes=self.devices.reserved_memory_bytes(),
            data_bytes=self.source.data_bytes,
            graph_bytes=self._step.graph_bytes(),
            notes=self.source.notes,
            parameter_checksum=self._agreed or checksum_of(self.module.parameters()),
            parameter_count=sum(p.numel() for p in self.module.parameters()),
        )

    def _take_turns(self, recorder: Recorder[Tensor], observer: Observer) -> None:
        """Where experiments share the run, let the source change what is left out."""
        if not self.task.turns:
            return
        change = Switches(self.module, self._step)
        turning = Turning(self.task, self.left_out, recorder, observer, change)
        self.source = Turned(
            self.source, self.task, self.devices, self.left_out, turning, self._agree
        )

    def _agree(self) -> None:
        """Ranks have equal weights now: for the last time where some turns exchange none."""
        if not self.left_out.never("exchange"):
            self._agreed = checksum_of(self.module.parameters())

    def _epoch(self, epoch: int, recorder: Recorder[Tensor]) -> None:
        self.model.train()
        self.source.epoch = epoch
        started = time.monotonic()
        recorder.begin()
        number = epoch * len(self.source)
        apart = max(0, WARM_UP - recorder.steps)
        for batches in chains(self.source, self.task.plan.steps_per_execution, apart=apart):
            losses = self.steps(batches, number)
            hashes = sum(batch.sample_hash for batch in batches)
            recorder.made(len(batches), batches[0].count, hashes, losses)
            number += len(batches)
        loss, count = recorder.end()
        seconds = time.monotonic() - started
        if self.task.plan.epochs is not None:
            recorder.epoch(self._finish_epoch(seconds, loss, count, recorder))
            self.keeper.keep(recorder.samples(), (epoch + 1) * len(self.source))
            recorder.tell()

    def _finish_epoch(
        self, seconds: float, loss: float, count: int, recorder: Recorder[Tensor]
    ) -> Epoch:
        sums = torch.tensor([loss, count], dtype=torch.float64, device=self.devices.primary)
        total, samples = parallel.summed(sums, self.task.world_size).tolist()
        parallel.average_buffers(self.module, self.task.world_size)
        accuracy = evaluate(
            self.model if self.task.world_size == 1 else self.module,
            self.made,
            self.normalize,
            self.precision,
            self.task,
            recorder.evaluating,
        )
        return Epoch(
            seconds=seconds,
            samples=round(samples),
            train_loss=total / samples,
            accuracy=accuracy,
        )
