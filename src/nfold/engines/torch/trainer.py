"""How losses that PyTorch keeps on a device are read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn

from nfold.core.interleave import communication_key
from nfold.core.measurement import Epoch, RankSamples
from nfold.core.variant import Variant
from nfold.engines.base import Observer, Task
from nfold.engines.interleaver import ActiveVariant, Interleaver, task_length
from nfold.engines.recorder import Recorder, plan_length
from nfold.engines.torch import batch_norm, layout
from nfold.engines.torch.batch import (
    Batch,
    CurrentShare,
    InputSamples,
    MicroBatches,
    Tensors,
    split_micro_batches,
)
from nfold.engines.torch.checkpoint import TrainingState, build_checkpointer
from nfold.engines.torch.communication import data_parallel
from nfold.engines.torch.communication.data_parallel import parameter_checksum
from nfold.engines.torch.devices import Devices, build_clock, open_devices
from nfold.engines.torch.error_translation import translate_errors
from nfold.engines.torch.input import batch_source
from nfold.engines.torch.input.batch_source import (
    BatchSource,
    build_image_preparation,
    build_image_source,
    build_preparation,
    build_source,
)
from nfold.engines.torch.input.preprocessing import Normalize, build_normalizer
from nfold.engines.torch.layout import use_im2col
from nfold.engines.torch.lr_schedule import ConstantLearningRate, OneCycleLearningRate
from nfold.engines.torch.precision import Precision
from nfold.engines.torch.step.cuda_graph import WARM_UP_CALLS, make_capturable
from nfold.engines.torch.step.forward import (
    ForwardPass,
    compiled_forward,
    eager_forward,
    split_module,
)
from nfold.engines.torch.step.training_step import (
    BatchGroup,
    EagerStep,
    EpochTensor,
    TrainingStep,
    build_step,
    group_batches,
)
from nfold.engines.torch.torch_workload import TorchWorkload, check_ranks_agree, load_workload
from nfold.engines.torch.variant_support import RankObserver, apply_variant


def read_losses(tensors: Sequence[Tensor]) -> list[float]:
    """One loss a step, [] of a call of one step and [n] of one of n, copied to the host at once."""
    found: list[float] = torch.cat([losses.reshape(-1) for losses in tensors]).tolist()
    return found


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    workload: TorchWorkload,
    normalize: Normalize,
    precision: Precision,
    task: Task,
    report: Callable[[], None],
) -> float | None:
    """The share of test samples that the model classifies right, over all ranks.

    None without a test set, and where its targets are no classes [n] or the model's outputs no
    scores [n, classes].
    """
    arrays = workload.arrays
    n = len(arrays.test_labels)
    if not n or arrays.test_labels.ndim != 1 or arrays.test_labels.dtype.kind != "i":
        return None
    model.eval()
    device = next(model.parameters()).device
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    first, last = task.rank * n // task.world_size, (task.rank + 1) * n // task.world_size
    for start in range(first, last, workload.evaluation_batch):
        chosen = slice(start, min(start + workload.evaluation_batch, last))
        samples = torch.from_numpy(arrays.test_images[chosen].copy())
        labels = torch.from_numpy(arrays.test_labels[chosen].copy()).to(device)
        with precision.forward():
            outputs = model(normalize(samples))
        if _are_scores(outputs, len(labels)):
            right = (outputs.argmax(dim=1) == labels).sum()
            counts += torch.stack([right, torch.full_like(right, len(labels))])
        report()
    right, scored = data_parallel.all_reduce_sum(counts, task.world_size).tolist()
    return right / n if scored == n else None


def _are_scores(outputs: Any, samples: int) -> bool:
    return (
        isinstance(outputs, Tensor)
        and outputs.dim() == 2
        and samples == len(outputs)
        and (outputs.shape[1] > 1)
    )


# Experiments that take turns in one run of a workload: what they change, and when.
#
# The source of the batches brings them about: it is asked for the next batch between two steps.


class VariantSwitch:
    """Everything but the input that a turn changes in a training."""

    def __init__(self, module: nn.Module, step: TrainingStep) -> None:
        self._batch_norm = batch_norm.BatchNormSwitch(module)
        self._step = step
        self._threads = torch.get_num_threads()

    def __call__(self, variant: Variant) -> None:
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
        self._replays = batch_source.build_replays(source, kinds, devices)
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


# Training: one rank of one plan, from opening its devices to its samples.
#
# Observation wraps the step and is left out by passing nothing to observe with.

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
        data_parallel.process_group(task, devices),
        closing(Trainer(own, devices, load)) as trainer,
    ):
        batch_source.synchronize_start(task)
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
        made, task, devices = self.workload, self.task, self.devices
        batches: BatchSource
        if made.photographs is not None:
            batches = build_image_source(made.photographs, made.arrays, task, devices)
            self.prepare = build_image_preparation(made.arrays, task, self.normalize, devices)
        else:
            operations = made.operations if task.variant.augmentation else ()
            batches = build_source(made.arrays, task, operations, devices)
            self.prepare = build_preparation(made.arrays, task, operations, self.normalize, devices)
        self.source = batch_source.replay_source(batches, task, devices)

    def _build_model(self) -> None:
        module = self.workload.model.to(self.devices.primary)
        self.module: nn.Module = layout.apply_layout(module, cast(str, self.task.plan.layout))
        self.optimizer = self.workload.optimizer(self.module)
        self._make_capturable()
        torch.manual_seed(self.task.plan.seed + 1 + self.task.rank)
        plan, pieces = self.task.plan, split_module(self.module, self.task)
        ledger = CurrentShare(self.task.world_size)
        batch_norm.synchronize_batch_norm(self.module, plan, ledger)
        use_im2col(self.module, plan)
        self.model = data_parallel.wrap_model(
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
        turn = data_parallel.micro_batch_context(self.model, ledger)
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
        total, samples = data_parallel.all_reduce_sum(sums, self.task.world_size).tolist()
        data_parallel.average_buffers(self.module, self.task.world_size)
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
