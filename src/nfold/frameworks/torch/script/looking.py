"""A first look at a script, which is shorter where its steps are long."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

from nfold.frameworks.base import Task
from nfold.frameworks.length import RunLength
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.script.agreeing import agreed_value, publish
from nfold.frameworks.torch.script.facts import has_process_group
from nfold.frameworks.torch.script.trace import ProfilerTrace
from nfold.plan import LONG_STEP_S

DECISION_STEP = 6
"""The step after which it is known how long steps are: by then an optimizer that steps after every
fifth of another one's is known, too."""
SHORT_TIMED_STEPS, SHORT_TRACED_STEPS = 3, 2
"""Steps of a look at a script whose steps are longer."""


class ProbeRun(ProfilerTrace):
    """How long a run goes on that is wanted for what it shows, and its traced steps.

    Ranks that have no process group by their first step show nothing but that: each trains alone.
    """

    def __init__(self, task: Task, on_wait: Callable[[], None]) -> None:
        super().__init__(enabled=task.variant.profiler_steps)
        self._has_several_ranks = task.world_size > 1
        self._undecided = self._enabled and (task.plan.warmup_steps or 0) > DECISION_STEP
        self._on_wait = on_wait
        self._step_ends: list[float] = []

    def shortened_length(self, steps: int, devices: Devices) -> RunLength | None:
        """How long the run is from now on, once that is known; None: as long as it was to be."""
        if not self._undecided or steps > DECISION_STEP:
            return None
        if self._has_several_ranks and not has_process_group():
            self._undecided = self._enabled = False
            return RunLength(total=steps + 2, warmup=steps + 1, window=1)
        devices.synchronize()
        self._step_ends.append(time.monotonic())
        if steps < DECISION_STEP:
            return None
        slow = median(end - begin for begin, end in pairwise(self._step_ends)) > LONG_STEP_S
        publish("slow steps", slow)
        if not agreed_value("slow steps", slow, self._on_wait):
            return None
        self._left = 1 + SHORT_TRACED_STEPS
        return RunLength(total=steps + 1 + SHORT_TIMED_STEPS, warmup=steps + 1, window=1)
