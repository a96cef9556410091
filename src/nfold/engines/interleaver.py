"""The variant of a rank's steps now, and the variants of the whole run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nfold.core.interleave import ALL_SLICES, Slot, alternating_slots, schedule_slots
from nfold.core.variant import NO_INTERVENTIONS, Variant
from nfold.engines.base import Observer, Task
from nfold.engines.recorder import Recorder, RunLength, plan_length


class ActiveVariant:
    """``current`` is constant in a run of one variant.

    In an interleaved run it is the task's variant during warm-up, then that of the slot.
    """

    def __init__(self, task: Task) -> None:
        self.current = task.variant
        self.interleaved = task.interleaved_variants

    @property
    def all_variants(self) -> tuple[Variant, ...]:
        return self.interleaved or (self.current,)

    def is_baseline(self, field: str) -> bool:
        """Return whether no variant of the run changes this field."""
        return all(
            getattr(one, field) == getattr(NO_INTERVENTIONS, field) for one in self.all_variants
        )


class ConstantVariant(ActiveVariant):
    """The variant of a process that measures nothing."""

    def __init__(self, variant: Variant) -> None:
        self.current, self.interleaved = variant, ()


@dataclass(eq=False)
class Interleaver:
    """Goes through the slots of a run: updates ``active_variant`` and calls ``switch``.

    In a run that alternates with another one, it waits for that one between slices.
    """

    task: Task
    active_variant: ActiveVariant
    recorder: Recorder[Any]
    observer: Observer
    switch: Callable[[Variant], None]

    def __post_init__(self) -> None:
        self._slots = [*_slots(self.task)]

    @property
    def is_finished(self) -> bool:
        return not self._slots

    def begin_slot(self, steps_done: int) -> int:
        """Begin the next slot after ``steps_done`` steps of the run; return its number of steps.

        Ranks that did not synchronize wait for each other before the variant changes.
        """
        variants, slot = self.task.interleaved_variants, self._slots.pop(0)
        self.recorder.begin_slot(slot.variant_index)
        if self.task.alternates:
            if slot.variant_index is None:
                left = sum(one.variant_index is not None for one in self._slots)
                self.wait_for_slice(ALL_SLICES - left, steps_done)
            return slot.steps
        measured = slot if slot.variant_index is not None else self._slots[0]
        before, now = self.active_variant.current, variants[measured.variant_index or 0]
        if now != before:
            if not before.ranks_synchronize:
                self.observer.wait_for_other_ranks(steps_done)
            self.active_variant.current = now
            self.switch(now)
        return slot.steps

    def wait_for_slice(self, number: int, steps_done: int) -> None:
        """Wait until all ranks have made ``steps_done`` steps and may make slice ``number``."""
        self.observer.wait_for_other_ranks(steps_done)
        self.observer.wait_for_slice(number)


def task_length(task: Task) -> RunLength:
    """Return the length of a run that is measured in steps, with all slots."""
    plan, warmup = task.plan, task.plan.warmup_steps or 0
    total = warmup + (plan.steps or 0)
    slots = _slots(task)
    if not slots:
        return plan_length(plan, total)
    shortest = min(slot.steps for slot in slots if slot.variant_index is not None)
    length = RunLength.from_steps(total, warmup).in_loader_cycles(plan, max_steps=shortest)
    return dataclasses.replace(length, total=length.warmup + sum(slot.steps for slot in slots))


def _slots(task: Task) -> tuple[Slot, ...]:
    if task.alternates:
        return alternating_slots(task.plan)
    variants = task.interleaved_variants
    return schedule_slots(variants, task.plan) if variants else ()
