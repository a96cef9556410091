"""How long a script's run is, and who has a turn in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from nfold.core.plan import LONG_STEP_S
from nfold.engines import interleaver
from nfold.engines.base import Observer, Task
from nfold.engines.interleaver import ActiveVariant
from nfold.engines.recorder import Recorder, RunLength
from nfold.engines.torch.devices import Devices
from nfold.instrument.optimizer_steps import UNTYPED_DIST
from nfold.instrument.profilers import ProfilerTrace
from nfold.instrument.script_profiler import ScriptProfiler, has_process_group

UNLIMITED_STEPS = 2**62
"""Steps of a run whose length is in epochs."""
EPOCH_WINDOW_STEPS = 50
"""Steps of a window in such a run."""


class ScriptInterleaver:
    """Changes what is left out after the steps that its schedule names; without turns, nothing."""

    def __init__(
        self,
        task: Task,
        variant: ActiveVariant,
        recorder: Recorder[None],
        observer: Observer,
        profiler: ScriptProfiler,
    ) -> None:
        self._interleaver = interleaver.Interleaver(
            task, variant, recorder, observer, lambda _: profiler.switch_variant()
        )
        self._segment_end = planned_length(task).warmup

    def on_step(self, steps: int) -> None:
        """So many steps are made."""
        if not self._interleaver.is_finished and steps == self._segment_end:
            self._segment_end += self._interleaver.begin_slot(steps)


def planned_length(task: Task) -> RunLength:
    """How long the task's run is."""
    if task.plan.steps is None:
        return RunLength(UNLIMITED_STEPS, max(1, task.plan.warmup_steps or 0), EPOCH_WINDOW_STEPS)
    return interleaver.task_length(task)


# Ranks that decide alike: rank 0 by what it knows, the others by its word.
#
# They hear it through the store of the script's process group; without one each is by itself.

DECISION_POLL_S = 0.01


def publish(key: str, value: bool) -> None:
    """Rank 0 tells the others what it ``found``."""
    if has_process_group() and dist.get_rank() == 0:
        _decision_store().set(key, str(value))


def agreed_value(key: str, own_value: bool, on_wait: Callable[[], None]) -> bool:
    """What rank 0 told, or tells soon: ``waiting`` is called until then."""
    if not has_process_group() or dist.get_rank() == 0:
        return own_value
    store = _decision_store()
    while not store.check([key]):
        on_wait()
        time.sleep(DECISION_POLL_S)
    return bool(store.get(key) == str(True).encode())


def _decision_store() -> Any:
    return UNTYPED_DIST.PrefixStore("nfold-agreeing", distributed_c10d._get_default_store())


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
