"""The time that an explanation or a search may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nfold.explain import planner

MIN_OVERRUN_S = 60.0  # that the trials an explanation needs may exceed a small time budget by


@dataclass
class TimeBudget:
    """The time budget in seconds, which is the ``share`` of an explanation in the user's."""

    budget_s: float
    now: Callable[[], float] = time.monotonic
    share: float = 1.0
    started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.now()

    @property
    def remaining_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.budget_s - (self.now() - self.started_at))

    def sufficient_option(self, seconds: float) -> str:
        """Return the option ``--budget 90s`` that leaves an explanation so many seconds."""
        return f"--budget {planner.round_up(seconds / self.share)}s"

    @property
    def probe_limit_s(self) -> float:
        """Seconds that a probe run may take, with all that a script does before its steps."""
        return max(MIN_OVERRUN_S, self.budget_s)

    @property
    def required_s(self) -> float:
        """Seconds left for the trials without which there is no result; at most 0 if none."""
        left_s = self.budget_s - (self.now() - self.started_at)
        return left_s + max(MIN_OVERRUN_S, self.budget_s)
