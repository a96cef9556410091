"""What a run counts in Python while it steps, also where a graph steps without Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

import torch
from torch.optim import Optimizer

from nfold.frameworks.base import Observer, Phase
from nfold.frameworks.torch.capturable import frozen, versions
from nfold.frameworks.torch.exchange import Exchange
from nfold.frameworks.torch.share import Ledger
from nfold.frameworks.torch.user.registry import Prepared

Note = Callable[[], None]


class Books:
    """Steps, schedules and parts of steps. Notes made while a graph is recorded are kept for it.

    ``frozen`` and ``rates`` are what a recording depends on besides tensors.
    """

    def __init__(
        self, prepared: Prepared, ledger: Ledger, observer: Observer, device: torch.device
    ) -> None:
        self.device = device
        self.exchanges: list[Exchange] = []
        self._prepared = prepared
        self._ledger = ledger
        self._observer = observer
        self._recording: list[Note] | None = None
        self._exchanged: dict[Optimizer, int] = {}
        self._told = False
        self._trained: tuple[bool, ...] = ()

    def begin(self) -> None:
        """An epoch of training begins; what is trained in it is what is not frozen now."""
        for exchange in self.exchanges:
            exchange.begin()
        parameters = (p for model in self._prepared.models for p in model.parameters())
        self._trained = tuple(parameter.requires_grad for parameter in parameters)

    def note(self, change: Note) -> None:
        """Make a change now, or where a graph is recorded after each of its replays."""
        if self._recording is None:
            change()
        else:
            self._recording.append(change)

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped; the first one that was prepared counts the steps."""
        if self.exchanges:
            self._check_exchanged(optimizer)
        if optimizer is self._prepared.optimizers[0]:
            self.note(self._count)

    def _check_exchanged(self, optimizer: Optimizer) -> None:
        """Warn once of gradients that no backward of nfold's brought: devices drift apart."""
        before = self._exchanged.get(optimizer, 0)
        now = self._exchanged[optimizer] = sum(one.finished for one in self.exchanges)
        if now > before or self._told:
            return
        groups = optimizer.param_groups
        if any(p.grad is not None for group in groups for p in group["params"]):
            self._told = True
            warnings.warn(
                "an optimizer stepped on gradients that were not exchanged, devices drift apart; "
                "next: one loss.backward() before each step, not torch.autograd.grad",
                stacklevel=5,  # the line that called step()
            )

    def _count(self) -> None:
        if self._ledger.share.last:
            self._prepared.steps += 1
            self._observer.beat(Phase.STEPPING, self._prepared.steps)

    def frozen(self) -> Hashable:
        """Share of the batch, settings of the optimizers, modes of the models, what is trained."""
        prepared = self._prepared
        return (
            self._ledger.share,
            tuple(exchange.holding for exchange in self.exchanges),
            tuple(frozen(optimizer) for optimizer in prepared.optimizers),
            tuple(model.training for model in prepared.models),
            self._trained,
        )

    def rates(self) -> list[int]:
        """How often each learning rate was changed in place."""
        return [count for optimizer in self._prepared.optimizers for count in versions(optimizer)]

    def recording(self) -> None:
        """Keep notes from here on instead of following them."""
        self._recording = []

    def gave_up(self) -> None:
        """Forget the backward that a broken recording left in the middle."""
        for exchange in self.exchanges:
            exchange.abandon()

    def recorded(self) -> Note:
        """Follow notes again; returns what repeats those that were kept, after a replay."""
        kept, self._recording = self._recording or [], None

        def repeat() -> None:
            for change in kept:
                change()
            for exchange in self.exchanges:
                exchange.replayed()

        return repeat
