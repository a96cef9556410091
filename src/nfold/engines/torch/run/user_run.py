"""A user's module made ready: on its device, in its layout, under its precision.

The module stays the user's own object with its names, methods and state_dict: its class becomes
a subclass whose forward moves the inputs and computes under autocast (as fully_shard of PyTorch
does it). A copy or a pickle of it is of the user's class again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
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
from nfold.engines.checkpoint_folder import newest_checkpoint, skipped_checkpoints_warning
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.batch_norm import synchronize_batch_norm
from nfold.engines.torch.communication import data_parallel
from nfold.engines.torch.communication.data_parallel import (
    GRADIENT_DTYPES,
    apply_in_place,
    average_buffers,
    collective_count,
    measure_bucket_bytes,
    sum_over_ranks,
    weighted_mean,
)
from nfold.engines.torch.communication.gradient_exchange import GradientExchange
from nfold.engines.torch.input.dataloader import to_device
from nfold.engines.torch.layout import MEMORY_FORMATS, subclass_with_forward
from nfold.engines.torch.lr_schedule import intercept_steps
from nfold.engines.torch.nested_tensors import map_tensors
from nfold.engines.torch.precision import AUTOCAST, LossScale, Precision
from nfold.engines.torch.run import state
from nfold.engines.torch.run.augmentation import AugmentOption, build_augment
from nfold.engines.torch.run.captured_step import captured_step, warn_needs_gpu
from nfold.engines.torch.run.job import Job
from nfold.engines.torch.run.loader import RunLoader, build_loader_config, resolve_settings
from nfold.engines.torch.run.state import Change, RunBookkeeping
from nfold.engines.torch.step.cuda_graph import make_capturable


class PreparedMarker:
    """Marks the subclasses that ``prepare`` makes; ``original`` is the user's class."""

    original: type[nn.Module]


def prepare_module(
    module: nn.Module, plan: Plan, device: torch.device, current_share: CurrentShare | None = None
) -> nn.Module:
    """The same module on ``device``, as the complete ``plan`` says; twice is once.

    ``ledger`` says what this rank's samples count in each step; without it all ranks' do alike.
    """
    if isinstance(module, PreparedMarker):
        return module
    module.to(device)
    memory = MEMORY_FORMATS[plan.layout or "channels_first"]
    if plan.layout == "channels_last":
        module.to(memory_format=memory)  # type: ignore[call-overload]
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
            return _to_fp32(inner(self, *args, **kwargs), half)

    return subclass_with_forward(original, PreparedMarker, forward)


def _to_fp32(output: Any, half: torch.dtype) -> Any:
    return map_tensors(output, lambda value: value.float() if value.dtype == half else value)


def broadcast_from_main(tensors: Iterable[Tensor]) -> None:
    """Give every rank rank 0's values of parameters and buffers."""
    for tensor in tensors:
        apply_in_place(tensor, lambda whole: dist.broadcast(whole, src=0))


P = ParamSpec("P")
R = TypeVar("R")
EVALUATION_WARNING = (
    "each of {ranks} devices evaluated its own part of the data, and nothing was summed over the "
    "devices before training continued: results are those of one part; next: "
    "correct = run.sum(correct) after the evaluation loop, before dividing by the number of samples"
)


class UserRun:
    """One rank of a data-parallel run of a user's own script.

    ``plan`` is complete but for the batch, which the loader knows.
    """

    def __init__(self, plan: Plan, job: Job, observer: Observer) -> None:
        self.plan = plan
        self._job = job
        self._observer = observer
        self._current_share = CurrentShare(job.world_size)
        self._prepared = state.PreparedObjects()
        self._bookkeeping = RunBookkeeping(
            self._prepared, self._current_share, observer, job.device
        )
        self._scale = LossScale() if plan.precision == "fp16" else None
        self._resumed: set[Path] = set()
        self._warned: set[str] = set()
        # Collectives before the evaluation whose results no collective has combined yet.
        self._collectives_before_evaluation: int | None = None
        Precision(plan.precision or "fp32", job.device)

    @property
    def rank(self) -> int:
        """This process's place among all ranks, from 0."""
        return self._job.rank

    @property
    def world_size(self) -> int:
        """How many ranks train together."""
        return self._job.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0: the one that prints and writes files."""
        return self._job.is_main

    @property
    def device(self) -> torch.device:
        """The device that this rank drives."""
        return self._job.device

    @property
    def steps(self) -> int:
        """Optimizer steps so far, those before a resume counted."""
        return self._prepared.steps

    def prepare(self, *objects: Any) -> Any:
        """Make models, optimizers and learning-rate schedules ready; returns them in order.

        Each stays the same object. Models go to this rank's device, take rank 0's weights, and
        from then on their gradients after ``backward()`` are those of the mean loss over the
        global batch.
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
                    f"a {type(one).__name__} cannot be prepared: allowed are modules, optimizers "
                    "and learning-rate schedules; next: run.loader(data, batch_size=...) for data"
                )
        return objects[0] if len(objects) == 1 else objects

    def _prepare_model(self, module: nn.Module) -> None:
        if module in self._prepared.models:
            return
        prepare_module(module, self.plan, self._job.device, self._current_share)
        if self._job.world_size > 1:
            broadcast_from_main([*module.parameters(), *module.buffers()])
        if self._job.world_size > 1 or self.plan.accumulate > 1:
            self._bookkeeping.exchanges.append(
                GradientExchange(
                    [module.parameters()],
                    self._job.world_size,
                    self._current_share,
                    payload_dtype=GRADIENT_DTYPES[self.plan.exchange],
                    bucket_bytes=measure_bucket_bytes(self.device, self.world_size),
                )
            )
        self._prepared.models.append(module)

    def _prepare_optimizer(self, optimizer: Optimizer) -> None:
        if optimizer in self._prepared.optimizers:
            return
        optimizer.register_step_post_hook(lambda one, *_: self._bookkeeping.on_optimizer_step(one))
        if self._captures:
            make_capturable(optimizer, self.device)
        if self._scale is not None:
            self._scale.require_scaled_backward(optimizer)
        self._prepared.optimizers.append(optimizer)

    def _prepare_schedule(self, schedule: LRScheduler) -> None:
        if schedule in self._prepared.schedulers:
            return

        def once(step: Change) -> None:
            if self._current_share.share.is_last:
                self._bookkeeping.apply_or_defer(step)

        if self.plan.accumulate > 1 or self._captures:
            intercept_steps(schedule, once)
        self._prepared.schedulers.append(schedule)

    @property
    def _captures(self) -> bool:
        return "captured" in (self.plan.step or "") and self.device.type == "cuda"

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
        """Batches of ``data`` for this rank, on its device; iterate it once an epoch.

        ``data`` are arrays (tensors, NumPy arrays, tuples or dictionaries of them), a map-style
        or iterable data set, a function that returns an iterator, or a DataLoader, whose
        settings are taken over. ``batch_size`` is the global batch: it is divided over the
        ranks, and over the parts of a step under accumulation. The samples of a step do not
        depend on the number of ranks. ``train=False`` gives every sample to exactly one rank,
        in order. ``augment`` gets each batch on the device: a function of the batch, or
        ``nfold.Images``, which draws for each sample alike on any number of devices. ``options``
        go to DataLoader. Iterable data with ``workers`` are read by one.
        """
        said = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "workers": workers,
            "collate": collate,
        }
        data, settings = resolve_settings(data, said, options)
        settings["augment"] = build_augment(augment, self.plan, self.device)
        recipe = build_loader_config(settings, self.plan, self._job, train=train)
        if not train:
            return RunLoader(
                data, recipe, self._current_share, self._begin_evaluation, self._report_evaluation
            )
        made = RunLoader(
            data, recipe, self._current_share, self._begin_training, self._report_training
        )
        self._prepared.loaders.append(made)
        return made

    def _begin_training(self) -> None:
        self._report_training()
        self._bookkeeping.begin_epoch()
        reasons = [self._prepared.missing_reason()]
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
        """Mark the function that makes one optimizer step, so that the plan may speed it up.

        With step ``captured`` its kernels are replayed without its Python: only what it returns
        comes out. Where that cannot be, on a CPU or with a line that waits for the device, it
        runs as it is, and says so once.
        """
        if self._captures:
            return captured_step(function, self._bookkeeping)
        if "captured" in (self.plan.step or ""):
            warn_needs_gpu(function)
        return function

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()``; under precision fp16 with the loss scaled, which it then needs."""
        if self._scale is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        parameters = [p for model in self._prepared.models for p in model.parameters()]
        self._scale.backward(loss, parameters)

    def sum(self, value: Any) -> Any:
        """The sum over all ranks, on every rank: of a number, a number; of a tensor, a tensor."""
        return sum_over_ranks(value, self.device, self.world_size)

    def mean(self, value: Any, count: int | None = None) -> float:
        """The mean over all ranks of a number or a tensor of one, each counting ``count`` times.

        Where nothing is said every rank counts once. In a training loop, ``count=len(labels)``
        of a rank that has no sample of a batch, and computes one beside it, is 0.
        """
        real = 1 if count is None else self._current_share.real_count(count)
        return weighted_mean(value, real, self.device, self.world_size)

    def checkpoint(self, folder: str | Path, *, keep: int = 2, **values: Any) -> Path:
        """Write everything that training goes on from into ``folder``; all ranks must call it.

        ``values`` are the script's own: numbers, texts, tensors, lists, dictionaries. The
        ``keep`` newest checkpoints stay. Raises UsageError where the folder holds checkpoints
        that this run did not go on from. Returns the checkpoint's own folder.
        """
        place = Path(folder).resolve()
        if place not in self._resumed and newest_checkpoint(place) is not None:
            raise UsageError(
                f"{folder} holds {newest_checkpoint(place)} of another run; next: run.resume({str(folder)!r}) "
                "before training, or another folder"
            )
        self._resumed.add(place)
        self._report_training()
        not_reduced = self._evaluation_not_reduced()
        for model in self._prepared.models:
            average_buffers(model, self.world_size)
        written = state.save_checkpoint(
            self._prepared,
            place,
            self._job,
            scale=self._scale,
            extra=values,
            keep=keep,
            wait=self._wait,
        )
        if not_reduced:  # the collectives of a checkpoint do not count
            self._collectives_before_evaluation = collective_count()
        return written

    def resume(self, folder: str | Path) -> dict[str, Any] | None:
        """Go on from the newest checkpoint in ``folder``: its own values, or None without one.

        Call it after everything is prepared. With as many ranks as before, samples, losses and
        weights go on exactly as they would have without the interruption.
        """
        place = Path(folder).resolve()
        self._resumed.add(place)
        found = newest_checkpoint(place)
        if found is None:
            return None
        if self.is_main and (skipped := skipped_checkpoints_warning(place)):
            warnings.warn(skipped, stacklevel=2)
        kept = state.load_checkpoint(self._prepared, found, self._job, self._scale)
        for optimizer in self._prepared.optimizers if self._captures else ():
            make_capturable(optimizer, self.device)
        return kept

    def _wait(self) -> None:
        data_parallel.barrier(self.world_size)
