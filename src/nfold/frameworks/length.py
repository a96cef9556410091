"""How long a run is, and how it is cut into windows."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from nfold.plan import Plan
from nfold.turns import in_rounds

WINDOWS = 10
LONGEST_WINDOW = 500
FEW_WINDOWS = 5
"""Fewer tell too little of how windows differ."""


@dataclass(frozen=True)
class Length:
    """How many steps a run has, how many of them warm up, how many make a window.

    ``before`` steps were made by an earlier process, and are not counted in the others.
    """

    total: int
    warmup: int
    window: int
    before: int = 0

    @classmethod
    def of(cls, total: int, warmup: int, before: int = 0) -> Length:
        """Between one step and half of them warm up; the rest is cut into about ten windows."""
        warmup = min(max(1, warmup), total // 2)
        window = min(max(1, math.ceil((total - warmup) / WINDOWS)), LONGEST_WINDOW)
        return cls(total, warmup, window, before)

    def in_rounds(self, plan: Plan, most: int) -> Length:
        """The same in windows of whole rounds of the plan's loader, of at most ``most`` steps."""
        return dataclasses.replace(self, window=in_rounds(self.window, plan, most))


def steps_of(plan: Plan, total: int, before: int = 0) -> Length:
    """So many steps of a plan, warm-up included, in whole rounds if there are enough of those."""
    warmup = plan.warmup_steps or 0
    return Length.of(total, warmup, before).in_rounds(plan, most=(total - warmup) // FEW_WINDOWS)
