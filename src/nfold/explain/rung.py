"""A rung of the ladder, and the same one measured in another way."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from nfold.ablation import Ablation
from nfold.plan import WARMUP_STEPS, Plan

EPOCHS = 3
"""Of a run of whole epochs."""
PASS_STEPS, PASSES = 11, 3
"""Of a pass that is cut short, and how many follow the first one.

A prime: what comes after every 5th or 10th step of a script does not come where a pass ends.
"""


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
        words = f"{devices} device{'s' * (devices != 1)}"
        words += ", a first look" if self.plan.batch is None else f", batch {self.plan.batch}"
        words += ", whole epochs" if self.plan.epochs else ""
        return words if self.ablation.trains else f"{words}, {self.ablation}"


@functools.cache
def whole_epochs(rung: Rung) -> Rung:
    """The same run, measured in epochs; what was made ahead is used up when the first one ends."""
    warmup = min(WARMUP_STEPS, rung.plan.warmup_steps or WARMUP_STEPS)
    plan = rung.plan.edit(epochs=EPOCHS, steps=None, warmup_steps=warmup)
    return Rung(plan=plan, ablation=rung.ablation)


@functools.cache
def short_passes(rung: Rung) -> Rung:
    """The same run of a script, in passes of so few steps that some end while it is measured.

    The first is the warm-up: what was made ahead is used up when it ends.
    """
    plan = rung.plan.edit(steps=PASSES * PASS_STEPS, epochs=None, warmup_steps=PASS_STEPS)
    left_out = Ablation(pass_batches=PASS_STEPS * rung.plan.accumulate)
    return Rung(plan=plan, ablation=rung.ablation.merged(left_out))


@functools.cache
def growing(rung: Rung) -> Rung:
    """The same with segments of memory that grow in place."""
    left_out = rung.ablation.merged(Ablation(expandable_segments=True))
    return Rung(plan=rung.plan, ablation=left_out)
