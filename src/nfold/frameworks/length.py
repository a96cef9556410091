"""How long a run is, and how it is cut into windows."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from nfold.plan import Plan
from nfold.turns import round_to_loader_cycle

TARGET_WINDOWS = 10
MAX_WINDOW_STEPS = 500
MIN_WINDOWS = 5
"""Fewer tell too little of how windows differ."""


@dataclass(frozen=True)
class RunLength:
    """How many steps a run has, how many of them warm up, how many make a window.

    ``before`` steps were made by an earlier process, and are not counted in the others.
    """

    total: int
    warmup: int
    window: int
    resumed_steps: int = 0

    @classmethod
    def from_steps(cls, total: int, warmup: int, resumed_steps: int = 0) -> RunLength:
        """Between one step and half of them warm up; the rest is cut into about ten windows."""
        warmup = min(max(1, warmup), total // 2)
        window = min(max(1, math.ceil((total - warmup) / TARGET_WINDOWS)), MAX_WINDOW_STEPS)
        return cls(total, warmup, window, resumed_steps)

    def in_worker_rounds(self, plan: Plan, max_steps: int) -> RunLength:
        """The same in windows of whole rounds of the plan's loader, of at most ``most`` steps."""
        return dataclasses.replace(self, window=round_to_loader_cycle(self.window, plan, max_steps))


def plan_length(plan: Plan, total: int, resumed_steps: int = 0) -> RunLength:
    """So many steps of a plan, warm-up included, in whole rounds if there are enough of those."""
    warmup = plan.warmup_steps or 0
    return RunLength.from_steps(total, warmup, resumed_steps).in_worker_rounds(
        plan, max_steps=(total - warmup) // MIN_WINDOWS
    )
