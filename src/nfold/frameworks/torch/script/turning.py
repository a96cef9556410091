"""How long a script's run is, and who has a turn in it."""

from __future__ import annotations

import dataclasses

from nfold.frameworks.base import Observer, Task
from nfold.frameworks.recording import Length, Recorder
from nfold.frameworks.torch.script.left_out import LeftOut
from nfold.frameworks.torch.script.sights import Sights
from nfold.turns import schedule

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
        self._turns = task.turns
        self._left_out = left_out
        self._recorder = recorder
        self._observer = observer
        self._sights = sights
        self._parts = list(schedule(task.turns, task.plan)) if task.turns else []
        self._ends = length_of(task).warmup

    def stepped(self, steps: int) -> None:
        """So many steps are made. Ranks that did not wait for each other meet before a change."""
        if not self._parts or steps != self._ends:
            return
        part = self._parts.pop(0)
        self._ends += part.steps
        self._recorder.take_turn(part.turn)
        turn = part.turn if part.turn is not None else self._parts[0].turn
        now = self._turns[turn or 0]
        if now != self._left_out.now:
            if not self._left_out.now.coupled:
                self._observer.await_others(steps)
            self._left_out.now = now
            self._sights.turn()


def length_of(task: Task) -> Length:
    """How long the task's run is."""
    plan, warmup = task.plan, task.plan.warmup_steps or 0
    if plan.steps is None:
        return Length(ENDLESS, max(1, warmup), EPOCH_WINDOW)
    of_one = Length.of(warmup + plan.steps, warmup)
    if not task.turns:
        return of_one
    steps = sum(part.steps for part in schedule(task.turns, plan))
    return dataclasses.replace(of_one, total=of_one.warmup + steps)
