"""A first look at a script, which is shorter where its steps are long."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

from nfold.frameworks.base import Task
from nfold.frameworks.length import Length
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.script.agreeing import heard, tell
from nfold.frameworks.torch.script.facts import joined
from nfold.frameworks.torch.script.trace import Tracing
from nfold.plan import LONG_STEP_S

DECIDES = 6
"""The step after which it is known how long steps are: by then an optimizer that steps after every
fifth of another one's is known, too."""
TIMED, TRACED = 3, 2
"""Steps of a look at a script whose steps are longer."""


class Look(Tracing):
    """How long a run goes on that is wanted for what it shows, and its traced steps.

    Ranks that have no process group by their first step show nothing but that: each trains alone.
    """

    def __init__(self, task: Task, waiting: Callable[[], None]) -> None:
        super().__init__(wanted=task.left_out.traced)
        self._several = task.world_size > 1
        self._open = self._wanted and (task.plan.warmup_steps or 0) > DECIDES
        self._waiting = waiting
        self._ended_at: list[float] = []

    def shortened(self, steps: int, devices: Devices) -> Length | None:
        """How long the run is from now on, once that is known; None: as long as it was to be."""
        if not self._open or steps > DECIDES:
            return None
        if self._several and not joined():
            self._open = self._wanted = False
            return Length(total=steps + 2, warmup=steps + 1, window=1)
        devices.synchronize()
        self._ended_at.append(time.monotonic())
        if steps < DECIDES:
            return None
        slow = median(end - begin for begin, end in pairwise(self._ended_at)) > LONG_STEP_S
        tell("slow steps", slow)
        if not heard("slow steps", slow, self._waiting):
            return None
        self._left = 1 + TRACED
        return Length(total=steps + 1 + TIMED, warmup=steps + 1, window=1)
