"""Training of a workload: one rank of one plan, from opening its devices to its samples."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import cast

import torch
from torch import Tensor, nn

from nfold.core.interleave import communication_key
from nfold.core.measurement import Epoch, RankSamples
from nfold.core.variant import Variant
from nfold.engines import rank_process
from nfold.engines.base import Observer, Task
from nfold.engines.interleaver import ActiveVariant, Interleaver, task_length
from nfold.engines.recorder import Recorder, plan_length
from nfold.engines.sampling import split_batch
from nfold.engines.torch import batch_norm, layout
from nfold.engines.torch.batch import (
    Batch,
    CurrentShare,
    InputSamples,
    MicroBatches,
    Tensors,
    split_micro_batches,
)
from nfold.engines.torch.checkpoint import Checkpointer, TrainingState
from nfold.engines.torch.communication import data_parallel
from nfold.engines.torch.communication.data_parallel import parameter_checksum
from nfold.engines.torch.communication.gradient_exchange import ExchangeWait
from nfold.engines.torch.devices import Devices, build_clock, open_devices, task_devices
from nfold.engines.torch.error_translation import translate_errors
from nfold.engines.torch.input import batch_source
from nfold.engines.torch.input.batch_source import (
    build_image_preparation,
    build_image_source,
    build_preparation,
    build_source,
)
from nfold.engines.torch.input.dataloader import BatchSource
from nfold.engines.torch.input.preprocessing import Normalize, build_normalizer
from nfold.engines.torch.layout import use_im2col
from nfold.engines.torch.lr_schedule import ConstantLearningRate, OneCycleLearningRate
from nfold.engines.torch.precision import Precision
from nfold.engines.torch.step.cuda_graph import WARM_UP_CALLS, CudaGraphRecorder, make_capturable
from nfold.engines.torch.step.forward import (
    ForwardPass,
    compiled_forward,
    eager_forward,
    split_module,
)
from nfold.engines.torch.step.training_step import (
    BatchGroup,
    EpochTensor,
    TrainingStep,
    group_batches,
)
from nfold.engines.torch.torch_settings import TorchSettings
from nfold.engines.torch.torch_workload import TorchWorkload, check_ranks_agree, load_workload
from nfold.engines.torch.variant_support import RankObserver, apply_variant


def read_losses(tensors: Sequence[Tensor]) -> list[float]:
    """Return one loss per step from losses [] or [n] of each call, copied to the host at once."""
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
    """Return the fraction of test samples, over all ranks, that the model classifies correctly.

    None without a test set, or if the targets are no classes [n] or the outputs no scores
    [n, classes].
    """
    arrays = workload.arrays
    n = len(arrays.test_labels)
    if not n or arrays.test_labels.ndim != 1 or arrays.test_labels.dtype.kind != "i":
        return None
    model.eval()
    device = next(model.parameters()).device
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    (own,) = split_batch(n, task.rank, task.world_size, micro_batches=1)
    for start in own[:: workload.evaluation_batch]:
        rows = slice(start, min(start + workload.evaluation_batch, own.stop))
        samples = torch.from_numpy(arrays.test_images[rows].copy())
        labels = torch.from_numpy(arrays.test_labels[rows].copy()).to(device)
        with precision.forward():
            outputs = model(normalize(samples))
        if (
            isinstance(outputs, Tensor)
            and outputs.dim() == 2
            and outputs.shape[1] > 1
            and (len(outputs) == len(labels))
        ):
            correct = (outputs.argmax(dim=1) == labels).sum()
            counts += torch.stack([correct, torch.full_like(correct, len(labels))])
        report()
    correct, scored = data_parallel.all_reduce_sum(counts, task.world_size).tolist()
    return correct / n if scored == n else None


class InterleavedSource(BatchSource):
    """Batches of an interleaved run, each slot with the input of its variant.

    ``on_warmup_end`` is called before the first slot. Slots begin when the next batch is requested,
    between two steps.
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
        self.data_bytes = sum(one.data_bytes for one in (source, *self._replays.values()))
        self.notes = source.notes

    def __len__(self) -> int:
        return len(self._real)

    def __iter__(self) -> Iterator[Batch]:
        self._real.epoch = self.epoch
        real = iter(self._real)
        replays = {kind: iter(source) for kind, source in self._replays.items()}
        yield from islice(real, self._warmup)
        self._on_warmup_end()
        done = self._warmup
        while not self._interleaver.is_finished:
            steps = self._interleaver.begin_slot(done)
            yield from islice(replays.get(self._active_variant.current.input, real), steps)
            done += steps

    def unpack(self, tensors: Tensors) -> InputSamples:
        return self._real.unpack(tensors)


LoadWorkload = Callable[[Task], TorchWorkload]


def train(task: Task, observer: Observer, load: LoadWorkload = load_workload) -> RankSamples:
    """Run one rank to its end. Raises OutOfMemory, Diverged, Collateral, or the user's own errors."""
    own = apply_variant(task)
    devices = open_devices(own)
    with (
        translate_errors(devices.peak_memory_bytes),
        data_parallel.process_group(task, devices),
        closing(Trainer(own, devices, load)) as trainer,
    ):
        if not task.variant.ranks_synchronize:
            data_parallel.barrier(task.world_size)  # a common start
        samples = trainer.run(
            observer if own.rank == task.rank else RankObserver(observer, task.rank)
        )
        return dataclasses.replace(samples, rank=task.rank)


def run_operation(task: Task, observer: Observer) -> RankSamples:
    """Run one rank of an operation, such as conv2d. Raises OutOfMemory, Collateral or Mismatch.

    Without a process group CUDA starts in the first call, which is timed with it.
    """
    lazy = task.world_size == 1 and task.plan.device == "cuda"
    devices = task_devices(task) if lazy else open_devices(task)
    barrier = partial(data_parallel.barrier, task.world_size)
    with translate_errors(devices.peak_memory_bytes), data_parallel.process_group(task, devices):
        return rank_process.run_operation(
            task, observer, "torch", devices.all, devices.describe, barrier
        )


class Trainer:
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
        self._settings = TorchSettings((task.variant, *task.interleaved_variants))

    def _build_input(self) -> None:
        workload, task, devices = self.workload, self.task, self.devices
        arrays, normalize = workload.arrays, self.normalize
        batches: BatchSource
        if workload.photographs is not None:
            batches = build_image_source(workload.photographs, arrays, task, devices)
            self.prepare = build_image_preparation(arrays, task, normalize, devices)
        else:
            operations = workload.operations if task.variant.augmentation else ()
            batches = build_source(arrays, task, operations, devices)
            self.prepare = build_preparation(arrays, task, operations, normalize, devices)
        self.source = batch_source.replay_source(batches, task, devices)

    def _build_model(self) -> None:
        module = self.workload.model.to(self.devices.primary)
        self.module: nn.Module = layout.apply_layout(module, cast(str, self.task.plan.layout))
        self.optimizer = self.workload.optimizer(self.module)
        captures = "captured" in cast(str, self.task.plan.step)
        own_optimizer = captures and self.task.workload.function_reference is not None
        if own_optimizer:
            make_capturable(self.optimizer, self.devices.primary)
        torch.manual_seed(self.task.plan.seed + 1 + self.task.rank)
        plan, pieces = self.task.plan, split_module(self.module, self.task)
        current_share = CurrentShare(self.task.world_size)
        batch_norm.synchronize_batch_norm(self.module, plan, current_share)
        use_im2col(self.module, plan)
        self.model = data_parallel.wrap_model(
            self.module,
            self.task,
            self.devices,
            current_share,
            self.optimizer,
            pieces,
            self.active_variant,
        )
        forward_pass = ForwardPass(
            self.source.unpack, self.prepare, self.workload.loss, self.precision
        )
        rare = usual = eager_forward(forward_pass, self.model)
        if "compiled" in cast(str, plan.step):
            usual = compiled_forward(forward_pass, pieces, tuned=plan.kernels == "tuned")
        largest = min(cast(int, plan.batch), len(self.workload.arrays.train_labels))
        usual_sizes = {part.rows for part in self._micro_batches(largest)}
        context = data_parallel.micro_batch_context(self.model, current_share)
        self.lr_schedule = ConstantLearningRate()
        if peak := self.workload.peak_lr:
            steps = (plan.epochs or 1) * len(self.source)
            self.lr_schedule = OneCycleLearningRate(
                self.optimizer, peak, steps, self.devices.primary
            )
        self._exchange_wait = ExchangeWait(
            enabled=self.task.world_size > 1 and not self.devices.is_cuda
        )
        self._step = TrainingStep(
            usual,
            rare,
            usual_sizes,
            self.precision,
            self.optimizer,
            context,
            self.lr_schedule,
            self._exchange_wait,
            CudaGraphRecorder(self.devices.primary) if captures else None,
        )
        self.checkpointer = Checkpointer(
            self.task,
            TrainingState(
                models=[self.module],
                optimizers=[self.optimizer],
                scaler=self.precision.scaler,
                capture_device=self.devices.primary if own_optimizer else None,
            ),
        )
        self._final_checksum: str | None = None

    def step(self, batch: Batch) -> Tensor:
        return self._step(
            batch.tensors, self._epoch_tensor(batch.epoch), self._micro_batches(batch.global_count)
        )

    def run_steps(self, batches: BatchGroup, first_step: int) -> Tensor:
        """Make one update for each of several equal batches from step ``first_step`` on; losses."""
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
        self._settings.restore()
        self._step.close()

    def run(self, observer: Observer) -> RankSamples:
        self._settings.apply(self.task.variant)
        earlier = self.checkpointer.resume()
        done, steps = len(earlier.epochs), len(self.source)
        epochs = range(done, self.task.plan.epochs or 1)
        if self.task.interleaved_variants:
            length = task_length(self.task)
        else:
            length = plan_length(self.task.plan, len(epochs) * steps, done * steps)
        clock, device = build_clock(self.devices), self.devices.describe()
        recorder = Recorder(
            self.task.rank,
            device,
            clock,
            observer,
            length,
            read_losses,
            read_exchange_wait=self._exchange_wait.take_seconds,
        )
        recorder.resume_from(earlier)
        if self.task.interleaved_variants:
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
        task, active = self.task, self.active_variant
        switch_batch_norm = batch_norm.BatchNormSwitch(self.module)

        def switch(variant: Variant) -> None:
            switch_batch_norm(synchronized=variant.synchronised_batch_norm)
            self._step.switch_exchange(communication_key(variant))
            self._settings.apply(variant)

        interleaver = Interleaver(task, active, recorder, observer, switch)
        self.source = InterleavedSource(
            self.source, task, self.devices, active, interleaver, self._record_checksum
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
        single = max(0, WARM_UP_CALLS - recorder.steps)
        group_size = self.task.plan.steps_per_execution
        for batches in group_batches(self.source, group_size, single_batches=single):
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
