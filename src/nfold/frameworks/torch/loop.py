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
from nfold.frameworks.left_out import ActiveVariant
from nfold.frameworks.length import plan_length
from nfold.frameworks.recording import Recorder
from nfold.frameworks.torch import ablate, batch_norm, layout, parallel
from nfold.frameworks.torch.ablation import RankObserver, apply_variant
from nfold.frameworks.torch.batch import Batch
from nfold.frameworks.torch.capturable import make_capturable
from nfold.frameworks.torch.capture import WARM_UP_CALLS
from nfold.frameworks.torch.chain import BatchGroup, group_batches
from nfold.frameworks.torch.clock import build_clock
from nfold.frameworks.torch.definition import TorchWorkload, check_ranks_agree, load_workload
from nfold.frameworks.torch.devices import Devices, open_devices
from nfold.frameworks.torch.evaluate import evaluate
from nfold.frameworks.torch.few_channels import use_im2col
from nfold.frameworks.torch.forward import (
    ForwardPass,
    compiled_forward,
    eager_forward,
    split_module,
)
from nfold.frameworks.torch.images import build_normalizer
from nfold.frameworks.torch.keeping import TrainingState, build_checkpointer
from nfold.frameworks.torch.observe import read_losses
from nfold.frameworks.torch.parts import MicroBatches, split_micro_batches
from nfold.frameworks.torch.precision import Precision
from nfold.frameworks.torch.rate import ConstantLearningRate, OneCycleLearningRate
from nfold.frameworks.torch.share import CurrentShare
from nfold.frameworks.torch.source import (
    BatchSource,
    build_image_preparation,
    build_image_source,
    build_preparation,
    build_source,
)
from nfold.frameworks.torch.step import EagerStep, EpochTensor, build_step
from nfold.frameworks.torch.translate import translate_errors
from nfold.frameworks.torch.turning import InterleavedSource, VariantSwitch
from nfold.frameworks.torch.weights import parameter_checksum
from nfold.frameworks.turning import Interleaver, task_length
from nfold.measurement import Epoch, RankSamples

LoadWorkload = Callable[[Task], TorchWorkload]
"""What a task trains."""


def train(task: Task, observer: Observer, load: LoadWorkload = load_workload) -> RankSamples:
    """Run one rank to its end; raises OutOfMemory, Diverged or Collateral, or what the user's
    own code raises.
    """
    own = apply_variant(task)
    devices = open_devices(own)
    with (
        translate_errors(devices.peak_memory_bytes),
        parallel.process_group(task, devices),
        closing(Trainer(own, devices, load)) as trainer,
    ):
        ablate.synchronize_start(task)
        samples = trainer.run(
            observer if own.rank == task.rank else RankObserver(observer, task.rank)
        )
        return dataclasses.replace(samples, rank=task.rank)


class Trainer:
    """A model, its data and its step on this rank's devices."""

    def __init__(self, task: Task, devices: Devices, load: LoadWorkload = load_workload) -> None:
        self.task = task
        self.devices = devices
        self.active_variant = ActiveVariant(task)
        self.workload = load(task)
        check_ranks_agree(self.workload, task, devices.primary)
        arrays = self.workload.arrays
        self.precision = Precision(cast(str, task.plan.precision), devices.primary)
        self.normalize = build_normalizer(arrays, cast(str, task.plan.layout), devices.primary)
        self._build_input()
        self._epoch_tensor = EpochTensor(devices.primary)
        self._build_model()

    def _build_input(self) -> None:
        """Where batches come from, and what the device still does to them."""
        made, task, devices = self.workload, self.task, self.devices
        batches: BatchSource
        if made.photographs is not None:
            batches = build_image_source(made.photographs, made.arrays, task, devices)
            self.prepare = build_image_preparation(made.arrays, task, self.normalize, devices)
        else:
            operations = made.operations if task.variant.augmentation else ()
            batches = build_source(made.arrays, task, operations, devices)
            self.prepare = build_preparation(made.arrays, task, operations, self.normalize, devices)
        self.source = ablate.replay_source(batches, task, devices)

    def _build_model(self) -> None:
        """The same weights on every rank; after them, draws of its own (dropout) on each."""
        module = self.workload.model.to(self.devices.primary)
        self.module: nn.Module = layout.apply_layout(module, cast(str, self.task.plan.layout))
        self.optimizer = self.workload.optimizer(self.module)
        self._make_capturable()
        torch.manual_seed(self.task.plan.seed + 1 + self.task.rank)
        plan, pieces = self.task.plan, split_module(self.module, self.task)
        ledger = CurrentShare(self.task.world_size)
        batch_norm.synchronize_batch_norm(self.module, plan, ledger)
        use_im2col(self.module, plan)
        self.model = parallel.wrap_model(
            self.module,
            self.task,
            self.devices,
            ledger,
            self.optimizer,
            pieces,
            self.active_variant,
        )
        way = ForwardPass(self.source.unpack, self.prepare, self.workload.loss, self.precision)
        rare = usual = eager_forward(way, self.model)
        if "compiled" in cast(str, plan.step):
            usual = compiled_forward(way, pieces, tuned=plan.kernels == "tuned")
        largest = min(cast(int, plan.batch), len(self.workload.arrays.train_labels))
        usual_sizes = {part.rows for part in self._micro_batches(largest)}
        turn = parallel.micro_batch_context(self.model, ledger)
        self.lr_schedule = self._build_lr_schedule(self.workload.peak_lr)
        update = EagerStep(
            usual, rare, usual_sizes, self.precision, self.optimizer, turn, self.lr_schedule
        )
        self._step = build_step(
            cast(str, plan.step), update, self.lr_schedule, self.devices.primary
        )
        self.checkpointer = build_checkpointer(
            self.task, TrainingState(self.module, self.optimizer, self.precision.scaler)
        )
        self._final_checksum: str | None = None

    def _make_capturable(self) -> None:
        """Let a user's own optimizer step inside a graph, where there is one."""
        if self.task.workload.function_reference and "captured" in cast(str, self.task.plan.step):
            make_capturable(self.optimizer, self.devices.primary)

    def _build_lr_schedule(self, peak: float) -> ConstantLearningRate:
        steps = (self.task.plan.epochs or 1) * len(self.source)
        return (
            OneCycleLearningRate(self.optimizer, peak, steps, self.devices.primary)
            if peak
            else ConstantLearningRate()
        )

    def step(self, batch: Batch) -> Tensor:
        """One optimizer update; returns the mean loss over this rank's samples, not yet read."""
        return self._step(
            batch.tensors, self._epoch_tensor(batch.epoch), self._micro_batches(batch.global_count)
        )

    def run_steps(self, batches: BatchGroup, first_step: int) -> Tensor:
        """One update for each batch, which are alike, from step number ``first`` on; losses."""
        if len(batches) == 1:
            self.lr_schedule.set_step(first_step)
            return self.step(batches[0])
        head, rates = batches[0], self.lr_schedule.step_rates(first_step, len(batches))
        parts = self._micro_batches(head.global_count)
        tensors = [batch.tensors for batch in batches]
        return self._step.run_many(tensors, self._epoch_tensor(head.epoch), parts, rates)

    def _micro_batches(self, samples: int) -> MicroBatches:
        """This rank's parts of a global batch."""
        task = self.task
        return split_micro_batches(samples, task.rank, task.world_size, task.plan.accumulate)

    def close(self) -> None:
        """Give back what would keep the process group from ending."""
        self._step.close()

    def run(self, observer: Observer) -> RankSamples:
        """All steps of the plan, observed."""
        earlier = self.checkpointer.resume()
        self._make_capturable()
        done, steps = len(earlier.epochs), len(self.source)
        epochs = range(done, self.task.plan.epochs or 1)
        if self.task.interleaved_variants:
            length = task_length(self.task)
        else:
            length = plan_length(self.task.plan, len(epochs) * steps, done * steps)
        timer, device = build_clock(self.devices), self.devices.describe()
        recorder = Recorder(self.task.rank, device, timer, observer, length, read_losses)
        recorder.resume_from(earlier)
        self._interleave(recorder, observer)
        for epoch in epochs:
            self._run_epoch(epoch, recorder)
        return recorder.samples(
            peak_memory_bytes=self.devices.peak_memory_bytes(),
            reserved_memory_bytes=self.devices.reserved_memory_bytes(),
            data_bytes=self.source.data_bytes,
            graph_bytes=self._step.graph_bytes(),
            caveats=self.source.notes,
            parameter_checksum=self._final_checksum or parameter_checksum(self.module.parameters()),
            parameter_count=sum(p.numel() for p in self.module.parameters()),
        )

    def _interleave(self, recorder: Recorder[Tensor], observer: Observer) -> None:
        """Where experiments share the run, let the source change what is left out."""
        if not self.task.interleaved_variants:
            return
        change = VariantSwitch(self.module, self._step)
        turning = Interleaver(self.task, self.active_variant, recorder, observer, change)
        self.source = InterleavedSource(
            self.source,
            self.task,
            self.devices,
            self.active_variant,
            turning,
            self._record_checksum,
        )

    def _record_checksum(self) -> None:
        """Ranks have equal weights now: for the last time where some turns exchange none."""
        if not self.active_variant.is_baseline("exchange"):
            self._final_checksum = parameter_checksum(self.module.parameters())

    def _run_epoch(self, epoch: int, recorder: Recorder[Tensor]) -> None:
        self.model.train()
        self.source.epoch = epoch
        started = time.monotonic()
        recorder.begin_epoch()
        number = epoch * len(self.source)
        apart = max(0, WARM_UP_CALLS - recorder.steps)
        for batches in group_batches(
            self.source, self.task.plan.steps_per_execution, single_batches=apart
        ):
            losses = self.run_steps(batches, number)
            hashes = sum(batch.sample_hash for batch in batches)
            recorder.record_steps(len(batches), batches[0].count, hashes, losses)
            number += len(batches)
        loss, count = recorder.end_epoch()
        seconds = time.monotonic() - started
        if self.task.plan.epochs is not None:
            recorder.add_epoch(self._finish_epoch(seconds, loss, count, recorder))
            self.checkpointer.save(recorder.samples(), (epoch + 1) * len(self.source))
            recorder.publish_epoch()

    def _finish_epoch(
        self, seconds: float, loss: float, count: int, recorder: Recorder[Tensor]
    ) -> Epoch:
        sums = torch.tensor([loss, count], dtype=torch.float64, device=self.devices.primary)
        total, samples = parallel.all_reduce_sum(sums, self.task.world_size).tolist()
        parallel.average_buffers(self.module, self.task.world_size)
        accuracy = evaluate(
            self.model if self.task.world_size == 1 else self.module,
            self.workload,
            self.normalize,
            self.precision,
            self.task,
            recorder.report_evaluation,
        )
        return Epoch(
            seconds=seconds,
            samples=round(samples),
            train_loss=total / samples,
            accuracy=accuracy,
        )
