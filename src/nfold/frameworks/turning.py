"""Who has a turn in a run that several experiments share, and how long such a run is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from nfold.ablation import Ablation
from nfold.frameworks.base import Observer, Task
from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.length import Length, steps_of
from nfold.frameworks.recording import Recorder
from nfold.turns import schedule


class Turning:
    """Goes through the parts of a run; ``left_out`` has what is left out now, ``change`` acts."""

    def __init__(
        self,
        task: Task,
        left_out: LeftOut,
        recorder: Recorder[Any],
        observer: Observer,
        change: Callable[[Ablation], None],
    ) -> None:
        self._turns = task.turns
        self._left_out = left_out
        self._recorder = recorder
        self._observer = observer
        self._change = change
        self._parts = list(schedule(task.turns, task.plan)) if task.turns else []

    @property
    def over(self) -> bool:
        """Whether every part has begun."""
        return not self._parts

    def begin(self, steps: int) -> int:
        """Begin the next part after so many steps of the run; returns how many it has.

        Ranks that did not wait for each other meet before what is left out changes.
        """
        part = self._parts.pop(0)
        self._recorder.take_turn(part.turn)
        turn = part.turn if part.turn is not None else self._parts[0].turn
        before, now = self._left_out.now, self._turns[turn or 0]
        if now != before:
            if not before.coupled:
                self._observer.await_others(steps)
            self._left_out.now = now
            self._change(now)
        return part.steps


def length_of(task: Task) -> Length:
    """How long a run is that is measured in steps, everybody's turns included."""
    plan, warmup = task.plan, task.plan.warmup_steps or 0
    total = warmup + (plan.steps or 0)
    if not task.turns:
        return steps_of(plan, total)
    parts = schedule(task.turns, plan)
    shortest = min(part.steps for part in parts if part.turn is not None)
    of_one = Length.of(total, warmup).in_rounds(plan, most=shortest)
    return dataclasses.replace(of_one, total=of_one.warmup + sum(part.steps for part in parts))
