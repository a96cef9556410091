"""How long a script's run is, and who has a turn in it."""

from __future__ import annotations

from nfold.frameworks import turning
from nfold.frameworks.base import Observer, Task
from nfold.frameworks.left_out import ActiveVariant
from nfold.frameworks.length import RunLength
from nfold.frameworks.recording import Recorder
from nfold.frameworks.torch.script.sights import ScriptProfiler

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
        self._interleaver = turning.Interleaver(
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
    return turning.task_length(task)
