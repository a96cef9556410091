"""Bookkeeping of the steps of a Run, and the reason why its training is not prepared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from nfold.engines.base import Observer, Phase
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.checkpoint import TrainingState
from nfold.engines.torch.communication.gradient_exchange import GradientExchange, StepGuard
from nfold.engines.torch.run.prepared_module import prepared_forward
from nfold.engines.torch.step.cuda_graph import (
    captured_settings,
    lr_versions,
    make_capturable,
)

PREPARE_ADVICE = "next: model, optimizer = run.prepare(model, optimizer)"


def missing_reason(prepared: TrainingState, parameters: Iterable[nn.Parameter]) -> str | None:
    """Return what was not prepared although training needs it, or None.

    ``parameters`` are those that were prepared.
    """
    if not prepared.models:
        return "no model is prepared: nfold exchanges no gradients; " + PREPARE_ADVICE
    if not prepared.optimizers:
        return f"no optimizer is prepared: steps and checkpoints lack it; {PREPARE_ADVICE}"
    groups = [group for optimizer in prepared.optimizers for group in optimizer.param_groups]
    known = set(parameters)
    missing = sum(p not in known for group in groups for p in group["params"])
    if not missing:
        return None
    return (
        f"an optimizer updates {missing} parameters of no prepared model: their gradients are "
        "not exchanged and devices diverge; next: run.prepare(module) of their module, again if "
        "parameters were added later"
    )


Change = Callable[[], None]


@dataclass(eq=False)
class RunBookkeeping:
    """Counts steps and steps schedules. Changes during a recording are deferred to its replays.

    ``on_step`` is called after every step that was counted.
    """

    prepared: TrainingState
    current_share: CurrentShare
    observer: Observer
    device: torch.device

    def __post_init__(self) -> None:
        self.exchanges: list[GradientExchange] = []
        self.parameters: list[nn.Parameter] = []
        self.guard: StepGuard | None = None
        self._deferred: list[Change] | None = None
        self._backwards_at_step: dict[Optimizer, int] = {}
        self._warned = False
        self._capturable: set[Optimizer] = set()
        self.on_step: Change = lambda: None

    def begin_epoch(self) -> None:
        for exchange in self.exchanges:
            exchange.begin_epoch()

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
            self.on_step()

    def captured_state(self) -> Hashable:
        prepared = self.prepared
        return (
            self.current_share.share,
            tuple(exchange.is_accumulating for exchange in self.exchanges),
            tuple(captured_settings(optimizer) for optimizer in prepared.optimizers),
            tuple(model.training for model in prepared.models),
            tuple(parameter.requires_grad for parameter in self.parameters),
            self.model_steps(),
        )

    def confirm_step(self) -> None:
        """Confirm a step whose last part updates, or is a CUDA graph that updates."""
        if self.guard is not None and self.current_share.share.is_last:
            self.guard.confirm()

    def model_steps(self) -> tuple[str, ...]:
        return tuple(prepared_forward(model).step for model in self.prepared.models)

    def make_capturable(self) -> None:
        """Let the prepared optimizers step inside a graph, each once."""
        for optimizer in self.prepared.optimizers:
            if optimizer not in self._capturable:
                self._capturable.add(optimizer)
                make_capturable(optimizer, self.device)

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
