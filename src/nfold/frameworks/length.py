"""How long a run is, and how it is cut into windows."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    def of(cls, total: int, warmup: int, before: int = 0, whole: int = 1) -> Length:
        """Between one step and half of them warm up; the rest is cut into about ten windows.

        Each has a multiple of ``whole`` steps.
        """
        warmup = min(max(1, warmup), total // 2)
        window = min(max(1, math.ceil((total - warmup) / WINDOWS)), LONGEST_WINDOW)
        return cls(total, warmup, math.ceil(window / whole) * whole, before)
