"""What a run counts in Python while it steps, also where a graph steps without Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

import torch
from torch.optim import Optimizer

from nfold.frameworks.base import Observer, Phase
from nfold.frameworks.torch.capturable import captured_settings, lr_versions
from nfold.frameworks.torch.exchange import GradientExchange
from nfold.frameworks.torch.share import CurrentShare
from nfold.frameworks.torch.user.registry import PreparedObjects

Change = Callable[[], None]


class RunBookkeeping:
    """Steps, schedules and parts of steps. Notes made while a graph is recorded are kept for it.

    ``frozen`` and ``rates`` are what a recording depends on besides tensors.
    """

    def __init__(
        self,
        prepared: PreparedObjects,
        current_share: CurrentShare,
        observer: Observer,
        device: torch.device,
    ) -> None:
        self.device = device
        self.exchanges: list[GradientExchange] = []
        self._prepared = prepared
        self._current_share = current_share
        self._observer = observer
        self._deferred: list[Change] | None = None
        self._backwards_at_step: dict[Optimizer, int] = {}
        self._warned = False
        self._trained: tuple[bool, ...] = ()

    def begin_epoch(self) -> None:
        """An epoch of training begins; what is trained in it is what is not frozen now."""
        for exchange in self.exchanges:
            exchange.begin_epoch()
        parameters = (p for model in self._prepared.models for p in model.parameters())
        self._trained = tuple(parameter.requires_grad for parameter in parameters)

    def apply_or_defer(self, change: Change) -> None:
        """Make a change now, or where a graph is recorded after each of its replays."""
        if self._deferred is None:
            change()
        else:
            self._deferred.append(change)

    def on_optimizer_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped; the first one that was prepared counts the steps."""
        if self.exchanges:
            self._check_exchanged(optimizer)
        if optimizer is self._prepared.optimizers[0]:
            self.apply_or_defer(self._count_step)

    def _check_exchanged(self, optimizer: Optimizer) -> None:
        """Warn once of gradients that no backward of nfold's brought: devices drift apart."""
        before = self._backwards_at_step.get(optimizer, 0)
        now = self._backwards_at_step[optimizer] = sum(
            one.completed_backwards for one in self.exchanges
        )
        if now > before or self._warned:
            return
        groups = optimizer.param_groups
        if any(p.grad is not None for group in groups for p in group["params"]):
            self._warned = True
            warnings.warn(
                "an optimizer stepped on gradients that were not exchanged, devices drift apart; "
                "next: one loss.backward() before each step, not torch.autograd.grad",
                stacklevel=5,  # the line that called step()
            )

    def _count_step(self) -> None:
        if self._current_share.share.is_last:
            self._prepared.steps += 1
            self._observer.beat(Phase.STEPPING, self._prepared.steps)

    def captured_state(self) -> Hashable:
        """Share of the batch, settings of the optimizers, modes of the models, what is trained."""
        prepared = self._prepared
        return (
            self._current_share.share,
            tuple(exchange.is_accumulating for exchange in self.exchanges),
            tuple(captured_settings(optimizer) for optimizer in prepared.optimizers),
            tuple(model.training for model in prepared.models),
            self._trained,
        )

    def lr_versions(self) -> list[int]:
        """How often each learning rate was changed in place."""
        return [
            count for optimizer in self._prepared.optimizers for count in lr_versions(optimizer)
        ]

    def begin_recording(self) -> None:
        """Keep notes from here on instead of following them."""
        self._deferred = []

    def abandon_recording(self) -> None:
        """Forget the backward that a broken recording left in the middle."""
        for exchange in self.exchanges:
            exchange.reset()

    def end_recording(self) -> Change:
        """Follow notes again; returns what repeats those that were kept, after a replay."""
        kept, self._deferred = self._deferred or [], None

        def repeat() -> None:
            for change in kept:
                change()
            for exchange in self.exchanges:
                exchange.after_replay()

        return repeat
