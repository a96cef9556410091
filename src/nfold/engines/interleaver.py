"""What is left out of a rank's steps now, and what ever will be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from nfold.core.interleave import schedule_slots
from nfold.core.variant import NO_INTERVENTIONS, Variant
from nfold.engines.base import Observer, Task
from nfold.engines.recorder import Recorder, RunLength, plan_length


class ActiveVariant:
    """``now`` is constant in a run without turns; with them it is what the process is held to
    until the warm-up is over, and then that of the turn.
    """

    def __init__(self, task: Task) -> None:
        self.current = task.variant
        self.interleaved = task.interleaved_variants

    @property
    def all_variants(self) -> tuple[Variant, ...]:
        """Everything that is left out at some time."""
        return self.interleaved or (self.current,)

    def is_baseline(self, field: str) -> bool:
        """Whether what this field of an Ablation is about is in place all the time."""
        return all(
            getattr(one, field) == getattr(NO_INTERVENTIONS, field) for one in self.all_variants
        )


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
