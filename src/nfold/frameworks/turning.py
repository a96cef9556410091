"""Who has a turn in a run that several experiments share, and how long such a run is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from nfold.ablation import Variant
from nfold.frameworks.base import Observer, Task
from nfold.frameworks.left_out import ActiveVariant
from nfold.frameworks.length import RunLength, plan_length
from nfold.frameworks.recording import Recorder
from nfold.turns import schedule_slots


class Interleaver:
    """Goes through the parts of a run; ``left_out`` has what is left out now, ``change`` acts."""

    def __init__(
        self,
        task: Task,
        active_variant: ActiveVariant,
        recorder: Recorder[Any],
        observer: Observer,
        switch: Callable[[Variant], None],
    ) -> None:
        self._variants = task.interleaved_variants
        self._active_variant = active_variant
        self._recorder = recorder
        self._observer = observer
        self._switch = switch
        self._slots = (
            list(schedule_slots(task.interleaved_variants, task.plan))
            if task.interleaved_variants
            else []
        )

    @property
    def is_finished(self) -> bool:
        """Whether every part has begun."""
        return not self._slots

    def begin_slot(self, steps_done: int) -> int:
        """Begin the next part after so many steps of the run; returns how many it has.

        Ranks that did not wait for each other meet before what is left out changes.
        """
        part = self._slots.pop(0)
        self._recorder.begin_slot(part.variant_index)
        turn = (
            part.variant_index if part.variant_index is not None else self._slots[0].variant_index
        )
        before, now = self._active_variant.current, self._variants[turn or 0]
        if now != before:
            if not before.ranks_synchronize:
                self._observer.wait_for_other_ranks(steps_done)
            self._active_variant.current = now
            self._switch(now)
        return part.steps


def task_length(task: Task) -> RunLength:
    """How long a run is that is measured in steps, everybody's turns included."""
    plan, warmup = task.plan, task.plan.warmup_steps or 0
    total = warmup + (plan.steps or 0)
    if not task.interleaved_variants:
        return plan_length(plan, total)
    parts = schedule_slots(task.interleaved_variants, plan)
    shortest = min(part.steps for part in parts if part.variant_index is not None)
    of_one = RunLength.from_steps(total, warmup).in_worker_rounds(plan, max_steps=shortest)
    return dataclasses.replace(of_one, total=of_one.warmup + sum(part.steps for part in parts))
