"""``nfold.Run`` behind its public name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nfold.core.errors import UsageError
from nfold.core.plan import Plan
from nfold.engines.base import Observer, Phase
from nfold.engines.checkpoint_folder import newest_checkpoint
from nfold.engines.sampling import BatchShare
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.checkpoint import (
    TrainingState,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from nfold.engines.torch.communication.data_parallel import (
    GRADIENT_DTYPES,
    apply_in_place,
    average_buffers,
    measure_bucket_bytes,
    sum_over_ranks,
    weighted_mean,
)
from nfold.engines.torch.communication.gradient_exchange import GradientExchange
from nfold.engines.torch.communication.sharded_optimizer import (
    ShardedOptimizer,
    require_separate_updates,
)
from nfold.engines.torch.lr_schedule import intercept_steps
from nfold.engines.torch.precision import LossScale
from nfold.engines.torch.run.augmentation import AugmentOption, build_augment
from nfold.engines.torch.run.automatic_plan import AutomaticPlan
from nfold.engines.torch.run.captured_step import captured_step, warn_needs_gpu
from nfold.engines.torch.run.closures import share_closures
from nfold.engines.torch.run.fitted_step import (
    FitGuard,
    FittedStep,
    advise_on_out_of_memory,
    require_step,
)
from nfold.engines.torch.run.job import Job
from nfold.engines.torch.run.loader import RunLoader, build_loader_config, resolve_settings
from nfold.engines.torch.run.padding import PaddingValues, apply_padding
from nfold.engines.torch.run.plan_switch import RunPlanSwitch
from nfold.engines.torch.run.prepared_module import prepare_module
from nfold.engines.torch.run.state import RunBookkeeping, missing_reason
from nfold.engines.torch.run.training_rate import TrainingRate
from nfold.engines.torch.step.cuda_graph import complete_momentum, use_fused_kernels
from nfold.instrument.torch_private import collective_count

P = ParamSpec("P")
R = TypeVar("R")
EVALUATION_WARNING = (
    "each of {ranks} devices evaluated its own part of the data, and nothing was summed over the "
    "devices before training continued: results are those of one part; next: "
    "correct = run.sum(correct) after the evaluation loop, before dividing by the number of samples"
)


class UserRun:
    """One rank of a data-parallel run of a user's script. ``plan`` needs no batch."""

    def __init__(
        self, plan: Plan, job: Job, observer: Observer, is_automatic: bool = False
    ) -> None:
        self.plan = plan
        self._job = job
        self._observer = observer
        self._is_automatic = is_automatic
        self._current_share = CurrentShare(job.world_size)
        self._scale = LossScale() if plan.precision == "fp16" else None
        self._prepared = TrainingState(scaler=self._scale)
        self._bookkeeping = RunBookkeeping(
            self._prepared, self._current_share, observer, job.device
        )
        self._is_captured = False
        self._automatic: AutomaticPlan | None = None
        self._training_rate = TrainingRate(job.device)
        if self._fits:
            self._bookkeeping.guard = FitGuard(
                self._bookkeeping, self._build_exchange, job.world_size
            )
        self._fitted_steps: list[FittedStep] = []
        advise_on_out_of_memory()
        self._resumed: set[Path] = set()
        self._warned: set[str] = set()
        # Collectives before the evaluation whose results no collective has combined yet.
        self._collectives_before_evaluation: int | None = None
        if is_automatic and not torch.backends.cudnn.deterministic:
            torch.backends.cudnn.benchmark = True

    @property
    def rank(self) -> int:
        """The number of this process among all ranks, from 0."""
        return self._job.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._job.world_size

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which prints and writes files."""
        return self._job.is_main

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._job.device

    @property
    def is_choosing(self) -> bool:
        """Return whether the automatic plan still tries candidates, or waits until it may."""
        return self._automatic is not None and self._automatic.is_searching

    @property
    def steps(self) -> int:
        """Optimizer steps so far, with those before a resume."""
        return self._prepared.steps

    def prepare(self, *objects: Any) -> Any:
        """Prepare models, optimizers and learning-rate schedules for data-parallel training.

        Models move to this rank's device and take the weights of rank 0. From then on their
        gradients after ``backward()`` are those of the mean loss over the global batch.

        Returns:
            The same objects, in order: a single one by itself, several as a tuple.

        Raises:
            UsageError: An object is of another type, or uses several devices itself.
        """
        for one in objects:
            if isinstance(one, nn.DataParallel | nn.parallel.DistributedDataParallel):
                raise UsageError(
                    f"a {type(one).__name__} cannot be prepared, because it uses several devices "
                    "itself; next: run.prepare(model) of the model in it"
                )
            if isinstance(one, nn.Module):
                self._prepare_model(one)
            elif isinstance(one, Optimizer):
                self._prepare_optimizer(one)
            elif isinstance(one, LRScheduler):
                self._prepare_schedule(one)
            else:
                raise UsageError(
                    f"a {type(one).__name__} cannot be prepared; allowed are modules, optimizers "
                    "and learning-rate schedules; next: run.loader(data, batch_size=...) for data"
                )
        return objects[0] if len(objects) == 1 else objects

    def _prepare_model(self, module: nn.Module) -> None:
        prepare_module(module, self.plan, self._job.device, self._current_share)
        known = set(self._bookkeeping.parameters)
        new = [parameter for parameter in module.parameters() if parameter not in known]
        self._bookkeeping.parameters += new
        if self._job.world_size > 1:
            for tensor in (*new, *module.buffers()):
                apply_in_place(tensor, lambda whole: dist.broadcast(whole, src=0))
        if new and (
            self._job.world_size > 1 or self.plan.accumulate > 1 or self._bookkeeping.exchanges
        ):
            self._bookkeeping.exchanges.append(self._build_exchange(new))
        if module not in self._prepared.models:
            self._prepared.models.append(module)

    def _build_exchange(self, parameters: list[nn.Parameter]) -> GradientExchange:
        return GradientExchange(
            [parameters],
            self._job.world_size,
            self._current_share,
            payload_dtype=GRADIENT_DTYPES[self.plan.exchange],
            bucket_bytes=measure_bucket_bytes(self.device, self.world_size),
            guard=self._bookkeeping.guard if self.world_size > 1 else None,
        )

    def _prepare_optimizer(self, optimizer: Optimizer) -> None:
        if optimizer in self._prepared.optimizers:
            return
        if self._exchanges:
            share_closures(optimizer, self._current_share, self.device, self.world_size)
        optimizer.register_step_post_hook(lambda one, *_: self._bookkeeping.on_optimizer_step(one))
        if isinstance(self._bookkeeping.guard, FitGuard):
            optimizer.register_step_pre_hook(self._bookkeeping.guard.confirm_update)
        if self.plan.optimizer_state == "sharded":
            require_separate_updates(optimizer)
            if self.world_size > 1:
                sharded = ShardedOptimizer(optimizer, self.rank, self.world_size)
                self._prepared.sharded[optimizer] = sharded
        if self._is_automatic:
            use_fused_kernels(optimizer)
        if self._is_automatic or self._may_capture:
            complete_momentum(optimizer)  # after a sharded optimizer hides gradients of other ranks
        if self._scale is not None:
            self._scale.require_scaled_backward(optimizer)
        self._prepared.optimizers.append(optimizer)

    def _prepare_schedule(self, schedule: LRScheduler) -> None:
        if schedule in self._prepared.schedulers:
            return

        if self.plan.accumulate > 1 or self._may_capture or self._fits:
            intercept_steps(schedule, self._bookkeeping.apply_once_per_step)
        self._prepared.schedulers.append(schedule)

    @property
    def _exchanges(self) -> bool:
        return self.world_size > 1 or self.plan.accumulate > 1 or self._fits

    @property
    def _may_capture(self) -> bool:
        """Return whether a decorated step is captured: requested, or chosen because it can be."""
        requested = "captured" in (self.plan.step or "")
        return (requested or self.plan.step is None) and self.device.type == "cuda"

    @property
    def _fits(self) -> bool:
        return self.plan.memory == "fit"

    def loader(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        train: bool = True,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        workers: int | None = None,
        augment: AugmentOption | None = None,
        epochs: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
        pad_to: int | None = None,
        padding: PaddingValues | None = None,
        **options: Any,
    ) -> RunLoader:
        """Return this rank's batches of ``data``, on its device; iterate once per epoch.

        The samples of a step do not depend on the number of ranks.

        Args:
            data: Arrays (tensors, NumPy arrays, tuples or dictionaries of them), a map-style or
                iterable data set, a function that returns an iterator, or a DataLoader, whose
                settings are the defaults.
            batch_size: Samples of one optimizer step over all ranks and micro-batches.
            train: False for an evaluation: every sample on exactly one rank, in order.
            shuffle: Default: as ``train``, or as the DataLoader.
            drop_last: Skip an incomplete last batch.
            workers: Worker processes; 1 for iterable data.
            augment: A function of each batch on the device, or ``nfold.Images``, whose draws do not
                depend on the number of ranks.
            epochs: How often the script will iterate over the loader. The automatic plan may take
                longer for a longer training.
            collate: Makes a batch of a list of samples.
            pad_to: Pad integer tensors [n, length] of a batch to a multiple of this length.
            padding: The padding values by name or position in a batch; None: not padded. Default: 0
                for input_ids, attention_mask and token_type_ids, -100 for labels.
            **options: Further options of DataLoader.

        Raises:
            UsageError: The data or an argument cannot be used; the message lists the allowed values.
            OutOfMemory: ``input="resident"`` and the arrays do not fit on the devices.
        """
        arguments = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "workers": workers,
            "collate": collate,
        }
        data, settings = resolve_settings(data, arguments, options)
        data, settings["collate"] = apply_padding(data, settings["collate"], pad_to, padding)
        settings["augment"] = build_augment(augment, self.plan, self.device)
        config = build_loader_config(settings, self.plan, self._job, train=train)
        if not train:
            return RunLoader(
                data,
                config,
                self._current_share,
                self._begin_evaluation,
                lambda *_: self._report_evaluation(),
            )
        loader = RunLoader(
            data,
            config,
            self._current_share,
            lambda: self._begin_training(loader),
            self._count_batch,
            epochs,
        )
        self._prepared.loaders.append(loader)
        return loader

    def _begin_plan(self, loader: RunLoader) -> None:
        """Execute steps as the plan says, or begin to choose how; an epoch begins."""
        if self._automatic is None:
            switch = RunPlanSwitch(self.plan, self._job, self._bookkeeping, self._is_captured)
            is_active = self.plan.step is None
            if self.plan.step == "compiled+captured" and self.device.type == "cuda":
                switch.apply(self.plan.step, check=False)
            self._automatic = AutomaticPlan(switch, self._job, is_active=is_active)
            self._bookkeeping.on_step = self._automatic.on_step
        self._automatic.on_epoch(loader.steps_left)

    def _begin_training(self, loader: RunLoader) -> None:
        if self._fits:
            require_step(self._fitted_steps)
        self._report_training()
        self._training_rate.resume()
        self._bookkeeping.begin_epoch()
        if self._prepared.models:
            self._begin_plan(loader)
        reasons = [missing_reason(self._prepared, self._bookkeeping.parameters)]
        if self._evaluation_not_reduced():
            reasons.append(EVALUATION_WARNING.format(ranks=self.world_size))
        self._collectives_before_evaluation = None
        for reason in reasons:
            if reason is not None and self.is_main and reason not in self._warned:
                self._warned.add(reason)
                warnings.warn(reason, stacklevel=3)  # the loop over run.loader

    def _report_training(self) -> None:
        builds = self._automatic is not None and self._automatic.is_building
        phase = Phase.FIRST_STEP if builds or not self.steps else Phase.STEPPING
        self._observer.beat(phase, self.steps)

    def _count_batch(self, batch: Any, share: BatchShare) -> None:
        self._report_training()
        self._training_rate.count(batch, share)

    def _report_evaluation(self) -> None:
        self._observer.beat(Phase.EVALUATING, self.steps)

    def _begin_evaluation(self) -> None:
        self._report_evaluation()
        self._training_rate.pause()
        for model in self._prepared.models:
            average_buffers(model, self.world_size)
        if self.world_size > 1:
            self._collectives_before_evaluation = collective_count()

    def _evaluation_not_reduced(self) -> bool:
        before = self._collectives_before_evaluation
        return before is not None and collective_count() == before

    def step(self, function: Callable[P, R]) -> Callable[P, R]:
        """Mark the function that makes one optimizer step, so that the plan may capture it.

        With memory ``fit`` it is called once per micro-batch, and again after running out of memory.
        With step ``captured`` a CUDA graph replays its kernels without its Python: only its return
        value leaves it. If it cannot be captured (on a CPU, or because a line waits for the device),
        it runs eagerly with one warning.
        """
        if self._may_capture:
            self._is_captured = True
            self._prepared.capture_device = self.device
            own = captured_step(function, self._bookkeeping)
        else:
            own = function
            if "captured" in (self.plan.step or ""):
                warn_needs_gpu(function)
        if not self._fits:
            return own
        fitted = FittedStep(own, self._bookkeeping, self.plan)
        self._fitted_steps.append(fitted)
        return wraps(function)(fitted)

    def _refuse_in_step(self, name: str) -> None:
        if any(step.is_running for step in self._fitted_steps):
            raise UsageError(
                f'{name} in a function of @run.step waits for ranks that may repeat it (memory "fit")'
                "; next: return the value, and call it after the function"
            )

    def backward(self, loss: Tensor) -> None:
        """Call ``loss.backward()``; precision fp16 needs this method, which scales the loss."""
        if self._scale is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        parameters = [p for model in self._prepared.models for p in model.parameters()]
        self._scale.backward(loss, parameters)

    def sum(self, value: Any) -> Any:
        """Return the sum over all ranks: of a number, a number; of a tensor, a tensor."""
        self._refuse_in_step("run.sum")
        return sum_over_ranks(value, self.device, self.world_size)

    def mean(self, value: Any, count: int | None = None) -> float:
        """Return the mean over all ranks of a number or a tensor [], weighted by ``count``.

        By default every rank counts 1. In a training loop pass ``count=len(labels)``: it becomes 0
        on a rank that computes a padding sample.
        """
        self._refuse_in_step("run.mean")
        real = 1 if count is None else self._current_share.real_count(count)
        return weighted_mean(value, real, self.device, self.world_size)

    def rate(self) -> dict[str, float]:
        """Return ``samples_per_s`` and, if batches are tokens, ``tokens_per_s`` of all devices.

        They are those of the training loops since the last call, without evaluations. Tokens are the
        positions of ``input_ids``, or of integers [n, length] that a batch begins with, with padding;
        sequences of other devices count as long as this device's. Empty if nothing was trained.
        Waits for the device: do not call it in every step.
        """
        return self._training_rate.take()

    def checkpoint(self, folder: str | Path, *, keep: int = 2, **values: Any) -> Path:
        """Write the state of training into ``folder``; all ranks must call it.

        Args:
            folder: A folder that all ranks can read.
            keep: Number of newest checkpoints that stay.
            **values: The script's own numbers, texts, tensors, lists and dictionaries.

        Returns:
            The folder of the checkpoint.

        Raises:
            UsageError: The folder holds checkpoints of another run, or a value cannot be saved.
        """
        self._refuse_in_step("run.checkpoint")
        path = Path(folder).resolve()
        if path not in self._resumed and newest_checkpoint(path) is not None:
            raise UsageError(
                f"{folder} holds {newest_checkpoint(path)} of another run; next: "
                f"run.resume({str(folder)!r}) before training, or another folder"
            )
        self._resumed.add(path)
        self._report_training()
        not_reduced = self._evaluation_not_reduced()
        for model in self._prepared.models:
            average_buffers(model, self.world_size)
        written = save_checkpoint(
            self._prepared,
            path,
            rank=self.rank,
            world_size=self.world_size,
            keep=keep,
            extra=values,
        )
        if not_reduced:  # the collectives of a checkpoint do not count
            self._collectives_before_evaluation = collective_count()
        return written

    def resume(self, folder: str | Path) -> dict[str, Any] | None:
        """Restore the newest readable checkpoint in ``folder``; all ranks must call it.

        Call it after ``prepare`` and ``loader``. With the same number of ranks, samples, losses and
        weights continue as without the interruption.

        Returns:
            The values passed to ``checkpoint``; None if there is no checkpoint.

        Raises:
            UsageError: The checkpoint holds other objects than were prepared.
            DataCorrupt: No checkpoint in the folder can be read.
        """
        path = Path(folder).resolve()
        self._resumed.add(path)
        newest = find_checkpoint(path, self.rank)
        if newest is None:
            return None
        saved = load_checkpoint(self._prepared, newest, rank=self.rank, world_size=self.world_size)
        values: dict[str, Any] = saved.progress["extra"]
        return values
