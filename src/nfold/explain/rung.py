"""A rung of the ladder, and the same one measured in another way."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from nfold.ablation import Variant
from nfold.plan import WARMUP_STEPS, Plan

WHOLE_EPOCHS = 3
"""Of a run of whole epochs."""
SHORT_EPOCH_STEPS, SHORT_EPOCHS = 11, 3
"""Of a pass that is cut short, and how many follow the first one.

A prime: what comes after every 5th or 10th step of a script does not come where a pass ends.
"""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One question: a complete plan and what is left out. Equal ones are the same question."""

    plan: Plan
    variant: Variant = field(default_factory=Variant)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.plan, self.variant))

    def __hash__(self) -> int:
        return self._hash

    @property
    def ranks_synchronize(self) -> bool:
        """Whether its ranks wait for each other."""
        return self.variant.ranks_synchronize

    def __str__(self) -> str:
        devices = self.plan.devices or 1
        words = f"{devices} device{'s' * (devices != 1)}"
        words += ", a first look" if self.plan.batch is None else f", batch {self.plan.batch}"
        words += ", whole epochs" if self.plan.epochs else ""
        return words if self.variant.preserves_training else f"{words}, {self.variant}"


@functools.cache
def over_whole_epochs(trial: Trial) -> Trial:
    """The same run, measured in epochs; what was made ahead is used up when the first one ends."""
    warmup = min(WARMUP_STEPS, trial.plan.warmup_steps or WARMUP_STEPS)
    plan = trial.plan.edit(epochs=WHOLE_EPOCHS, steps=None, warmup_steps=warmup)
    return Trial(plan=plan, variant=trial.variant)


@functools.cache
def over_short_epochs(trial: Trial) -> Trial:
    """The same run of a script, in passes of so few steps that some end while it is measured.

    The first is the warm-up: what was made ahead is used up when it ends.
    """
    plan = trial.plan.edit(
        steps=SHORT_EPOCHS * SHORT_EPOCH_STEPS, epochs=None, warmup_steps=SHORT_EPOCH_STEPS
    )
    left_out = Variant(batches_per_epoch=SHORT_EPOCH_STEPS * trial.plan.accumulate)
    return Trial(plan=plan, variant=trial.variant.merge(left_out))


@functools.cache
def with_expandable_segments(trial: Trial) -> Trial:
    """The same with segments of memory that grow in place."""
    left_out = trial.variant.merge(Variant(expandable_segments=True))
    return Trial(plan=trial.plan, variant=left_out)
