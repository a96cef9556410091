"""Who has a turn, and where ranks meet before it."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from made import task
from nfold.core.interleave import SETTLE_STEPS
from nfold.core.variant import Variant
from nfold.engines.base import Observer
from nfold.engines.interleaver import ActiveVariant, Interleaver, task_length
from nfold.engines.recorder import Recorder

REAL, ALONE = Variant(), Variant(exchange="none")


class Noting(Observer):
    """A rank's observer and its recorder in one: keeps what they are told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def take_turn(self, turn: int | None) -> None:
        self.told.append(("turn", turn))

    def wait_for_other_ranks(self, step: int) -> None:
        self.told.append(("await", step))

    def change(self, now: Variant) -> None:
        self.told.append(("change", now))


def _gone_through(*turns: Variant, ablation: Variant | None = None) -> list[tuple[str, Any]]:
    made = task(steps=8, warmup_steps=2)
    asked = dataclasses.replace(made, interleaved_variants=turns, requested_variant=ablation)
    noting = Noting()
    turning = Interleaver(
        asked, ActiveVariant(asked), cast(Recorder[Any], noting), noting, noting.change
    )
    steps = task_length(asked).warmup
    while not turning.is_finished:
        steps += turning.begin_slot(steps)
    assert steps == task_length(asked).total
    return noting.told


def test_ranks_meet_after_a_turn_in_which_nobody_waited() -> None:
    told = _gone_through(REAL, ALONE)
    assert told[:4] == [("turn", 0), ("turn", None), ("change", ALONE), ("turn", 1)]
    # Two steps each, then backwards: two of one turn are neighbours.
    awaited = [step for kind, step in told if kind == "await"]
    assert awaited[0] == 2 + 2 + SETTLE_STEPS + 4
    changes = [value for kind, value in told if kind == "change"]
    assert changes == [ALONE, REAL] * 2
    assert len(awaited) == 2


def test_ranks_that_never_wait_meet_before_every_change() -> None:
    held = Variant(independent=True)
    turns = (held, dataclasses.replace(held, input="replayed"))
    told = _gone_through(*turns, ablation=held)
    kinds = [kind for kind, _ in told]
    assert kinds.count("await") == kinds.count("change") == 4


def test_without_turns_a_run_is_as_long_as_its_plan_says() -> None:
    asked, noting = task(steps=30, warmup_steps=10), Noting()
    assert task_length(asked).total == 40
    assert Interleaver(
        asked, ActiveVariant(asked), cast(Recorder[Any], noting), noting, noting.change
    ).is_finished


def _windows(*turns: Variant) -> list[int]:
    made = task(steps=40, warmup_steps=10)
    asked = dataclasses.replace(made, interleaved_variants=turns)
    plans = [made.plan.edit(workers=workers) for workers in (0, 1, 2, 4, 8, 9, 20, 21)]
    return [task_length(dataclasses.replace(asked, plan=plan)).window for plan in plans]


def test_windows_are_whole_rounds_of_a_loaders_workers() -> None:
    # Of nine workers there would be four windows, too few to tell how far a step may be off.
    assert _windows() == [4, 4, 4, 4, 8, 4, 4, 4]
    # A turn of ten steps is up to twice as long for them.
    assert _windows(REAL, ALONE) == [4, 4, 4, 4, 8, 9, 20, 4]
