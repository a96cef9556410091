"""The slots of an interleaved run, and where ranks wait for each other."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from made import task
from nfold.core.interleave import SETTLE_STEPS
from nfold.core.variant import Variant
from nfold.engines.base import Observer, Task
from nfold.engines.interleaver import ActiveVariant, Interleaver, task_length
from nfold.engines.recorder import Recorder

REAL, NO_EXCHANGE = Variant(), Variant(exchange="none")


class EventLog(Observer):
    """The observer and the recorder of a rank in one: logs the calls of an Interleaver."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def begin_slot(self, variant_index: int | None) -> None:
        self.events.append(("slot", variant_index))

    def wait_for_other_ranks(self, step: int) -> None:
        self.events.append(("wait", step))

    def switch(self, variant: Variant) -> None:
        self.events.append(("switch", variant))


def _interleaver(task: Task, log: EventLog) -> Interleaver:
    return Interleaver(task, ActiveVariant(task), cast(Recorder[Any], log), log, log.switch)


def _run(*variants: Variant, requested: Variant | None = None) -> list[tuple[str, Any]]:
    run = dataclasses.replace(
        task(steps=8, warmup_steps=2), interleaved_variants=variants, requested_variant=requested
    )
    log = EventLog()
    interleaver = _interleaver(run, log)
    steps = task_length(run).warmup
    while not interleaver.is_finished:
        steps += interleaver.begin_slot(steps)
    assert steps == task_length(run).total
    return log.events


def test_ranks_wait_after_a_variant_without_communication() -> None:
    events = _run(REAL, NO_EXCHANGE)
    assert events[:4] == [("slot", 0), ("slot", None), ("switch", NO_EXCHANGE), ("slot", 1)]
    # Two steps each, then in reverse order: two slots of one variant are neighbours.
    waits = [step for kind, step in events if kind == "wait"]
    assert waits[0] == 2 + 2 + SETTLE_STEPS + 4
    switches = [value for kind, value in events if kind == "switch"]
    assert switches == [NO_EXCHANGE, REAL] * 2
    assert len(waits) == 2


def test_independent_ranks_wait_before_every_switch() -> None:
    independent = Variant(independent=True)
    variants = (independent, independent.merge(Variant(input="replayed")))
    kinds = [kind for kind, _ in _run(*variants, requested=independent)]
    assert kinds.count("wait") == kinds.count("switch") == 4


def test_a_run_of_one_variant_has_the_length_of_its_plan() -> None:
    run = task(steps=30, warmup_steps=10)
    assert task_length(run).total == 40
    assert _interleaver(run, EventLog()).is_finished


def _windows(*variants: Variant) -> list[int]:
    run = dataclasses.replace(task(steps=40, warmup_steps=10), interleaved_variants=variants)
    plans = [run.plan.edit(workers=workers) for workers in (0, 1, 2, 4, 8, 9, 20, 21)]
    return [task_length(dataclasses.replace(run, plan=plan)).window for plan in plans]


def test_windows_are_whole_cycles_of_a_loaders_workers() -> None:
    # Nine workers would give four windows, too few for an interval.
    assert _windows() == [4, 4, 4, 4, 8, 4, 4, 4]
    # A slot of ten steps is up to twice as long for them.
    assert _windows(REAL, NO_EXCHANGE) == [4, 4, 4, 4, 8, 9, 20, 4]
