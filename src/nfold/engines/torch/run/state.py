"""The prepared objects of a Run, their checkpoints, and the bookkeeping of its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nfold.core.errors import UsageError
from nfold.engines.base import Observer, Phase
from nfold.engines.torch import checkpoint as files
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.communication.data_parallel import barrier
from nfold.engines.torch.communication.gradient_exchange import GradientExchange
from nfold.engines.torch.precision import LossScale
from nfold.engines.torch.run.job import Job
from nfold.engines.torch.run.loader import LoaderPosition, RunLoader
from nfold.engines.torch.step.cuda_graph import captured_settings, lr_versions

PREPARE_ADVICE = "next: model, optimizer = run.prepare(model, optimizer)"


@dataclass
class PreparedObjects:
    """The state of training: prepared objects in order, loaders, and optimizer steps."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    loaders: list[RunLoader] = field(default_factory=list)
    steps: int = 0

    def missing_reason(self) -> str | None:
        """Return what was not prepared although training needs it, or None."""
        if not self.models:
            return "no model is prepared: nfold exchanges no gradients; " + PREPARE_ADVICE
        if not self.optimizers:
            return f"no optimizer is prepared: steps and checkpoints lack it; {PREPARE_ADVICE}"
        prepared = {parameter for model in self.models for parameter in model.parameters()}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        missing = sum(p not in prepared for group in groups for p in group["params"])
        if not missing:
            return None
        return (
            f"an optimizer updates {missing} parameters of no prepared model: their gradients are "
            "not exchanged and devices diverge; next: run.prepare(module) of their module"
        )

    def checkpoint_parts(self) -> dict[str, Any]:
        kinds: dict[str, list[Any]] = {
            "model": self.models,
            "optimizer": self.optimizers,
            "scheduler": self.schedulers,
        }
        return {
            f"{kind}-{number}": part
            for kind, parts in kinds.items()
            for number, part in enumerate(parts)
        }


def save_checkpoint(
    prepared: PreparedObjects,
    folder: Path,
    job: Job,
    *,
    scale: LossScale | None,
    extra: dict[str, Any],
    keep: int,
) -> Path:
    final = folder / f"step-{prepared.steps}"
    staging = folder / f".{final.name}.new"
    if job.is_main:
        files.begin_checkpoint(staging)
    barrier(job.world_size)
    files.write_part(staging, f"random-{job.rank}", files.get_random_state())
    if job.is_main:
        parts = prepared.checkpoint_parts()
        for name, part in parts.items():
            files.write_part(staging, name, part.state_dict())
        progress = {
            "format": files.FORMAT,
            "steps": prepared.steps,
            "ranks": job.world_size,
            "parts": list(parts),
            "loaders": [[at.position.epoch, at.position.step] for at in prepared.loaders],
            "scale": None if scale is None else scale.state(),
            "extra": extra,
        }
        files.write_part(staging, "progress", progress)
    barrier(job.world_size)
    if job.is_main:
        files.commit_checkpoint(staging, final, keep)
    barrier(job.world_size)
    return final


def load_checkpoint(
    prepared: PreparedObjects, checkpoint: Path, job: Job, scale: LossScale | None
) -> dict[str, Any]:
    """Restore ``checkpoint``; return the user's own values in it.

    Raises UsageError if it holds other parts than were prepared. With another number of ranks,
    samples and their order stay the same, but dropout draws differ.
    """
    progress = files.read_part(checkpoint, "progress")
    if progress["parts"] != list(prepared.checkpoint_parts()):
        raise UsageError(
            f"{checkpoint} holds {', '.join(progress['parts'])}, prepared are "
            f"{', '.join(prepared.checkpoint_parts())}; next: run.resume() after all run.prepare()"
        )
    if len(progress["loaders"]) != len(prepared.loaders):
        raise UsageError(
            f"{checkpoint} holds positions of {len(progress['loaders'])} loaders, this script has "
            f"{len(prepared.loaders)}; next: run.resume() after all run.loader()"
        )
    for name, part in prepared.checkpoint_parts().items():
        part.load_state_dict(files.read_part(checkpoint, name))
    for loader, (epoch, step) in zip(prepared.loaders, progress["loaders"], strict=True):
        loader.seek(LoaderPosition(epoch=epoch, step=step))
    if scale is not None and progress["scale"] is not None:
        scale.load(progress["scale"])
    if progress["ranks"] == job.world_size:
        files.set_random_state(files.read_part(checkpoint, f"random-{job.rank}"))
    prepared.steps = progress["steps"]
    extra: dict[str, Any] = progress["extra"]
    return extra


Change = Callable[[], None]


@dataclass(eq=False)
class RunBookkeeping:
    """Counts steps and steps schedules. Changes during a recording are deferred to its replays."""

    prepared: PreparedObjects
    current_share: CurrentShare
    observer: Observer
    device: torch.device

    def __post_init__(self) -> None:
        self.exchanges: list[GradientExchange] = []
        self._deferred: list[Change] | None = None
        self._backwards_at_step: dict[Optimizer, int] = {}
        self._warned = False
        self._trained: tuple[bool, ...] = ()

    def begin_epoch(self) -> None:
        """Begin an epoch of training; note which parameters are frozen."""
        for exchange in self.exchanges:
            exchange.begin_epoch()
        parameters = (p for model in self.prepared.models for p in model.parameters())
        self._trained = tuple(parameter.requires_grad for parameter in parameters)

    def apply_or_defer(self, change: Change) -> None:
        """Make a change now or, during a recording, after each replay."""
        if self._deferred is None:
            change()
        else:
            self._deferred.append(change)

    def apply_once_per_step(self, change: Change) -> None:
        """Make or defer a change in the last micro-batch of a step."""
        if self.current_share.share.is_last:
            self.apply_or_defer(change)

    def on_optimizer_step(self, optimizer: Optimizer) -> None:
        """Count a step of the first prepared optimizer; check that gradients were exchanged."""
        if self.exchanges:
            self._check_exchanged(optimizer)
        if optimizer is self.prepared.optimizers[0]:
            self.apply_or_defer(self._count_step)

    def _check_exchanged(self, optimizer: Optimizer) -> None:
        before = self._backwards_at_step.get(optimizer, 0)
        now = sum(exchange.completed_backwards for exchange in self.exchanges)
        self._backwards_at_step[optimizer] = now
        if now > before or self._warned:
            return
        groups = optimizer.param_groups
        if any(p.grad is not None for group in groups for p in group["params"]):
            self._warned = True
            warnings.warn(
                "an optimizer stepped on gradients that were not exchanged: devices diverge; "
                "next: one loss.backward() before each step, not torch.autograd.grad",
                stacklevel=5,  # the line that called step()
            )

    def _count_step(self) -> None:
        if self.current_share.share.is_last:
            self.prepared.steps += 1
            self.observer.beat(Phase.STEPPING, self.prepared.steps)

    def captured_state(self) -> Hashable:
        prepared = self.prepared
        return (
            self.current_share.share,
            tuple(exchange.is_accumulating for exchange in self.exchanges),
            tuple(captured_settings(optimizer) for optimizer in prepared.optimizers),
            tuple(model.training for model in prepared.models),
            self._trained,
        )

    def lr_versions(self) -> list[int]:
        return [count for optimizer in self.prepared.optimizers for count in lr_versions(optimizer)]

    @property
    def is_recording(self) -> bool:
        return self._deferred is not None

    @contextmanager
    def recording(self) -> Iterator[Change]:
        """Yield a function that repeats after each replay what Python did in the recording."""
        changes: list[Change] = []

        def repeat() -> None:
            for change in changes:
                change()
            for exchange in self.exchanges:
                exchange.after_replay()

        self._deferred = changes
        try:
            yield repeat
        finally:
            self._deferred = None

    def abandon_recording(self) -> None:
        for exchange in self.exchanges:
            exchange.reset()
