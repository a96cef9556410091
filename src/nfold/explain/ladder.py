"""The ladder: the runs that differ by one thing each, from one device alone to the real run.

The work of a device in a step is the same on every rung: one device alone, independent copies of
it at the same time, data parallel without an exchange, with a barrier only, and the real run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from nfold.ablation import Ablation
from nfold.plan import Plan

Make = TypeVar("Make", bound=Callable[..., "Rung"])
Input = Literal["real", "replayed", "resident"]
Scaling = Literal["strong", "weak"]


def remembered(make: Make) -> Make:
    """The same object for the same rung: intervals ask for each some thousand times."""

    @functools.wraps(make)
    def asked(ladder: Ladder, *args: Any, **kwargs: Any) -> Rung:
        key = (make.__name__, args, tuple(kwargs.items()))
        if key not in ladder.made:
            ladder.made[key] = make(ladder, *args, **kwargs)
        return ladder.made[key]

    return cast(Make, asked)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One question: a complete plan and what is left out. Equal ones are the same question."""

    plan: Plan
    ablation: Ablation = field(default_factory=Ablation)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.plan, self.ablation))

    def __hash__(self) -> int:
        return self._hash

    @property
    def coupled(self) -> bool:
        """Whether its ranks wait for each other."""
        return self.ablation.coupled

    def __str__(self) -> str:
        devices = self.plan.devices or 1
        words = f"{devices} device{'s' * (devices != 1)}, batch {self.plan.batch}"
        words += ", whole epochs" if self.plan.epochs else ""
        return f"{words}, {self.ablation}" if self.ablation else words


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The rungs of one complete ``plan`` on N devices, measured in steps."""

    plan: Plan
    scaling: Scaling = "strong"
    made: dict[tuple[object, ...], Rung] = field(default_factory=dict, compare=False, repr=False)

    @property
    def devices(self) -> int:
        """N."""
        return self.plan.devices or 1

    @property
    def share(self) -> int:
        """The samples of one device in a step, on the fullest one."""
        return -(-(self.plan.batch or 1) // self.devices)

    @property
    def one_process(self) -> bool:
        """Whether one process drives all devices (nn.DataParallel)."""
        return self.plan.strategy == "dp"

    @property
    def bare(self) -> Input:
        """The input that costs least and can be had: the ladder's, free of the real input."""
        if self.plan.input == "resident":
            return "real"
        return "resident" if self.plan.device == "cuda" else "replayed"

    @functools.cached_property
    def one(self) -> Rung:
        """What N-fold is counted from: one device at the global batch, or at its share of it."""
        if self.scaling == "weak":
            return self.alone("real")
        return Rung(plan=self._on_one(batch=self.plan.batch))

    @remembered
    def alone(self, input_: Input, device: int = 0, **changes: Any) -> Rung:
        """One device alone, with the work that it has among N."""
        plan = self._on_one(batch=self.share).edit(**changes)
        return Rung(plan=plan, ablation=Ablation(input=input_, device=device))

    @remembered
    def copies(self, input_: Input) -> Rung:
        """N devices at the same time, each by itself."""
        return Rung(plan=self.plan, ablation=Ablation(input=input_, independent=True))

    @remembered
    def unexchanged(self, input_: Input, devices: tuple[int, ...] = ()) -> Rung:
        """Data parallel, with nothing exchanged; ranks drive ``devices`` in this order."""
        left_out = Ablation(
            input=input_, exchange="none", synchronised_batch_norm=self._batch_norm, devices=devices
        )
        return Rung(plan=self.plan, ablation=left_out)

    @remembered
    def barrier(self, input_: Input) -> Rung:
        """Data parallel, with one element a bucket exchanged."""
        left_out = Ablation(
            input=input_, exchange="barrier", synchronised_batch_norm=self._batch_norm
        )
        return Rung(plan=self.plan, ablation=left_out)

    @remembered
    def full(self, input_: Input = "real", *, batch_norm: bool = True) -> Rung:
        """The real run; without ``batch_norm``, its synchronised batch norm is plain."""
        plain = not batch_norm and self.synchronises_batch_norm
        return Rung(
            plan=self.plan, ablation=Ablation(input=input_, synchronised_batch_norm=not plain)
        )

    @remembered
    def edited(self, **changes: Any) -> Rung:
        """The real run under another plan."""
        return Rung(plan=self.plan.edit(**changes))

    @property
    def synchronises_batch_norm(self) -> bool:
        """Whether ranks exchange statistics in forward."""
        return self.plan.batch_norm == "synchronised"

    @property
    def _batch_norm(self) -> bool:
        """An exchange inside forward would couple ranks that must not be."""
        return not self.synchronises_batch_norm

    def _on_one(self, batch: int | None) -> Plan:
        return self.plan.edit(devices=1, strategy="single", batch=batch)
