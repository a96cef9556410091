"""Length of a script's run: interleaved slots, probe runs, and decisions common to all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch.distributed as dist

from nfold.core.plan import LONG_STEP_S
from nfold.engines import interleaver
from nfold.engines.base import Task
from nfold.engines.recorder import RunLength
from nfold.engines.torch.devices import Devices
from nfold.instrument import torch_private
from nfold.instrument.hooks.model_hooks import FIRST_STEPS
from nfold.instrument.optimizer_steps import UNTYPED_DIST
from nfold.instrument.profilers import ProfilerTrace
from nfold.instrument.script_profiler import has_process_group

UNLIMITED_STEPS = 2**62  # of a run that is measured in epochs
EPOCH_WINDOW_STEPS = 50  # per window in a run that is measured in epochs


class ScriptInterleaver(interleaver.Interleaver):
    """Switches the variant after the steps of the schedule; does nothing without interleaving.

    A run that alternates with another one also waits before the rest of its warm-up, which two at once
    would slow and disturb. Both may compile their first steps at the same time.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._segment_end = planned_length(self.task).warmup
        self._compiling_end = min(FIRST_STEPS, self._segment_end)

    def on_step(self, steps: int) -> None:
        if self.task.alternates and steps == self._compiling_end:
            self.wait_for_slice(0, steps)
        if not self.is_finished and steps == self._segment_end:
            self._segment_end += self.begin_slot(steps)


def planned_length(task: Task) -> RunLength:
    if task.plan.steps is None:
        return RunLength(UNLIMITED_STEPS, max(1, task.plan.warmup_steps or 0), EPOCH_WINDOW_STEPS)
    return interleaver.task_length(task)


DECISION_POLL_S = 0.01


def publish(key: str, value: bool) -> None:
    """Publish a decision of rank 0 to the other ranks, through the store of the process group."""
    if has_process_group() and dist.get_rank() == 0:
        _decision_store().set(key, str(value))


def agreed_value(key: str, own_value: bool, on_wait: Callable[[], None]) -> bool:
    """Return the decision of rank 0; call ``on_wait`` until it is published.

    Without a process group each rank decides by itself.
    """
    if not has_process_group() or dist.get_rank() == 0:
        return own_value
    store = _decision_store()
    while not store.check([key]):
        on_wait()
        time.sleep(DECISION_POLL_S)
    return bool(store.get(key) == str(True).encode())


def _decision_store() -> Any:
    return UNTYPED_DIST.PrefixStore("nfold-agreeing", torch_private.default_store())


# After this step the length of steps is known. An optimizer that steps in every fifth step of
# another is known by then, too.
DECISION_STEP = 6
SHORT_TIMED_STEPS, SHORT_TRACED_STEPS = 3, 2  # of a probe run with long steps


class ProbeRun(ProfilerTrace):
    """Length and trace of a probe run, which is shorter if the steps are long.

    Ranks without a process group at their first step train independently: that is all that the
    probe reports.
    """

    def __init__(self, task: Task, on_wait: Callable[[], None]) -> None:
        super().__init__(enabled=task.variant.profiler_steps)
        self._has_several_ranks = task.world_size > 1
        self._undecided = self._enabled and (task.plan.warmup_steps or 0) > DECISION_STEP
        self._on_wait = on_wait
        self._step_ends: list[float] = []

    def shortened_length(self, steps: int, devices: Devices) -> RunLength | None:
        """Return the new length of the run once it is known, None to keep the length."""
        if not self._undecided or steps > DECISION_STEP:
            return None
        if self._has_several_ranks and not has_process_group():
            self._undecided = self._enabled = False
            return RunLength(total=steps + 2, warmup=steps + 1, window=1)
        devices.synchronize()
        self._step_ends.append(time.monotonic())
        if steps < DECISION_STEP:
            return None
        is_slow = median(end - begin for begin, end in pairwise(self._step_ends)) > LONG_STEP_S
        publish("slow steps", is_slow)
        if not agreed_value("slow steps", is_slow, self._on_wait):
            return None
        self._remaining_steps = 1 + SHORT_TRACED_STEPS
        return RunLength(total=steps + 1 + SHORT_TIMED_STEPS, warmup=steps + 1, window=1)
