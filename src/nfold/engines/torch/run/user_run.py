"""``nfold.Run`` behind its public name, and the preparation of a user's module.

A prepared module stays the user's own object with its names, methods and state_dict: its class
becomes a subclass whose forward moves the inputs and computes under autocast, as PyTorch's
fully_shard does. A copy or a pickle of it is of the user's class.
"""

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
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.batch_norm import synchronize_batch_norm
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
from nfold.engines.torch.input.dataloader import to_device
from nfold.engines.torch.layout import (
    MEMORY_FORMATS,
    ChangedForward,
    apply_layout,
    subclass_with_forward,
)
from nfold.engines.torch.lr_schedule import intercept_steps
from nfold.engines.torch.nested_tensors import map_tensors
from nfold.engines.torch.precision import AUTOCAST, LossScale, Precision
from nfold.engines.torch.run.augmentation import AugmentOption, build_augment
from nfold.engines.torch.run.captured_step import captured_step, warn_needs_gpu
from nfold.engines.torch.run.fitted_step import (
    FitGuard,
    FittedStep,
    advise_on_out_of_memory,
    require_step,
)
from nfold.engines.torch.run.job import Job
from nfold.engines.torch.run.loader import RunLoader, build_loader_config, resolve_settings
from nfold.engines.torch.run.state import RunBookkeeping, missing_reason
from nfold.engines.torch.step.cuda_graph import make_capturable
from nfold.instrument.torch_private import collective_count


class PreparedMarker(ChangedForward): ...


def prepare_module(
    module: nn.Module, plan: Plan, device: torch.device, current_share: CurrentShare | None = None
) -> nn.Module:
    """Return the same module, moved to ``device`` and prepared for the complete ``plan``.

    A prepared module is not changed. ``current_share`` is this rank's share of each step; without it
    all ranks count the same.
    """
    if isinstance(module, PreparedMarker):
        return module
    module.to(device)
    if plan.layout == "channels_last":
        apply_layout(module, plan.layout)
    synchronize_batch_norm(module, plan, current_share or CurrentShare(plan.devices or 1))
    module.__class__ = _prepared_class(type(module), plan, device)
    return module


def _prepared_class(original: type[nn.Module], plan: Plan, device: torch.device) -> type[nn.Module]:
    inner: Callable[..., Any] = original.forward
    if "compiled" in (plan.step or ""):
        inner = torch.compile(inner)
    half = AUTOCAST.get(plan.precision or "fp32")
    memory = MEMORY_FORMATS["channels_last"] if plan.layout == "channels_last" else None

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = to_device((args, kwargs), device, memory)
        if half is None:
            return inner(self, *args, **kwargs)
        with torch.autocast(device.type, dtype=half):
            outputs = inner(self, *args, **kwargs)
            return map_tensors(outputs, lambda out: out.float() if out.dtype == half else out)

    return subclass_with_forward(original, PreparedMarker, forward)


P = ParamSpec("P")
R = TypeVar("R")
EVALUATION_WARNING = (
    "each of {ranks} devices evaluated its own part of the data, and nothing was summed over the "
    "devices before training continued: results are those of one part; next: "
    "correct = run.sum(correct) after the evaluation loop, before dividing by the number of samples"
)


class UserRun:
    """One rank of a data-parallel run of a user's script. ``plan`` needs no batch."""

    def __init__(self, plan: Plan, job: Job, observer: Observer) -> None:
        self.plan = plan
        self._job = job
        self._observer = observer
        self._current_share = CurrentShare(job.world_size)
        self._scale = LossScale() if plan.precision == "fp16" else None
        self._prepared = TrainingState(
            scaler=self._scale, capture_device=job.device if self._captures else None
        )
        self._bookkeeping = RunBookkeeping(
            self._prepared, self._current_share, observer, job.device
        )
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
        Precision(plan.precision or "fp32", job.device)

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
            UsageError: An object is of another type.
        """
        for one in objects:
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
        if module in self._prepared.models:
            return
        prepare_module(module, self.plan, self._job.device, self._current_share)
        if self._job.world_size > 1:
            for tensor in (*module.parameters(), *module.buffers()):
                apply_in_place(tensor, lambda whole: dist.broadcast(whole, src=0))
        if self._job.world_size > 1 or self.plan.accumulate > 1:
            self._bookkeeping.exchanges.append(self._build_exchange(module))
        self._prepared.models.append(module)

    def _build_exchange(self, module: nn.Module) -> GradientExchange:
        return GradientExchange(
            [module.parameters()],
            self._job.world_size,
            self._current_share,
            payload_dtype=GRADIENT_DTYPES[self.plan.exchange],
            bucket_bytes=measure_bucket_bytes(self.device, self.world_size),
            guard=self._bookkeeping.guard if self.world_size > 1 else None,
        )

    def _prepare_optimizer(self, optimizer: Optimizer) -> None:
        if optimizer in self._prepared.optimizers:
            return
        optimizer.register_step_post_hook(lambda one, *_: self._bookkeeping.on_optimizer_step(one))
        if isinstance(self._bookkeeping.guard, FitGuard):
            optimizer.register_step_pre_hook(self._bookkeeping.guard.confirm_update)
        if self.plan.optimizer_state == "sharded":
            require_separate_updates(optimizer)
            if self.world_size > 1:
                sharded = ShardedOptimizer(optimizer, self.rank, self.world_size)
                self._prepared.sharded[optimizer] = sharded
        if self._captures:
            make_capturable(optimizer, self.device)
        if self._scale is not None:
            self._scale.require_scaled_backward(optimizer)
        self._prepared.optimizers.append(optimizer)

    def _prepare_schedule(self, schedule: LRScheduler) -> None:
        if schedule in self._prepared.schedulers:
            return

        if self.plan.accumulate > 1 or self._captures or self._fits:
            intercept_steps(schedule, self._bookkeeping.apply_once_per_step)
        self._prepared.schedulers.append(schedule)

    @property
    def _captures(self) -> bool:
        return "captured" in (self.plan.step or "") and self.device.type == "cuda"

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
        collate: Callable[[list[Any]], Any] | None = None,
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
            collate: Makes a batch of a list of samples.
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
        settings["augment"] = build_augment(augment, self.plan, self.device)
        config = build_loader_config(settings, self.plan, self._job, train=train)
        if not train:
            return RunLoader(
                data, config, self._current_share, self._begin_evaluation, self._report_evaluation
            )
        loader = RunLoader(
            data, config, self._current_share, self._begin_training, self._report_training
        )
        self._prepared.loaders.append(loader)
        return loader

    def _begin_training(self) -> None:
        if self._fits:
            require_step(self._fitted_steps)
        self._report_training()
        self._bookkeeping.begin_epoch()
        reasons = [missing_reason(self._prepared)]
        if self._evaluation_not_reduced():
            reasons.append(EVALUATION_WARNING.format(ranks=self.world_size))
        self._collectives_before_evaluation = None
        for reason in reasons:
            if reason is not None and self.is_main and reason not in self._warned:
                self._warned.add(reason)
                warnings.warn(reason, stacklevel=3)  # the loop over run.loader

    def _report_training(self) -> None:
        self._observer.beat(Phase.STEPPING if self.steps else Phase.FIRST_STEP, self.steps)

    def _report_evaluation(self) -> None:
        self._observer.beat(Phase.EVALUATING, self.steps)

    def _begin_evaluation(self) -> None:
        self._report_evaluation()
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
        if self._captures:
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
