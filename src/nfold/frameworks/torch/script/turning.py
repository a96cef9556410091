"""How long a script's run is, and who has a turn in it."""

from __future__ import annotations

from nfold.frameworks import turning
from nfold.frameworks.base import Observer, Task
from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.length import Length
from nfold.frameworks.recording import Recorder
from nfold.frameworks.torch.script.sights import Sights

ENDLESS = 2**62
"""Steps of a run whose length is in epochs."""
EPOCH_WINDOW = 50
"""Steps of a window in such a run."""


class Turning:
    """Changes what is left out after the steps that its schedule names; without turns, nothing."""

    def __init__(
        self,
        task: Task,
        left_out: LeftOut,
        recorder: Recorder[None],
        observer: Observer,
        sights: Sights,
    ) -> None:
        self._turning = turning.Turning(task, left_out, recorder, observer, lambda _: sights.turn())
        self._ends = length_of(task).warmup

    def stepped(self, steps: int) -> None:
        """So many steps are made."""
        if not self._turning.over and steps == self._ends:
            self._ends += self._turning.begin(steps)


def length_of(task: Task) -> Length:
    """How long the task's run is."""
    if task.plan.steps is None:
        return Length(ENDLESS, max(1, task.plan.warmup_steps or 0), EPOCH_WINDOW)
    return turning.length_of(task)
