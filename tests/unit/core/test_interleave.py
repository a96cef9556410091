"""When experiments have their turns."""

from __future__ import annotations

from collections import Counter

from made import plan
from nfold.core.interleave import (
    MAX_CYCLES,
    RECAPTURE_STEPS,
    SETTLE_STEPS,
    SWITCHABLE_FIELDS,
    Slot,
    process_wide,
    round_to_loader_cycle,
    schedule_slots,
)
from nfold.core.variant import Variant

REAL, BARRIER = Variant(), Variant(exchange="barrier")
REPLAYED = Variant(input="replayed", exchange="none")


def test_variants_have_equal_steps_and_cycles_alternate_in_direction() -> None:
    parts = schedule_slots((REPLAYED, REAL, BARRIER), plan(steps=40, warmup_steps=30))
    steps: Counter[int | None] = Counter()
    for part in parts:
        steps[part.variant_index] += part.steps
    assert {turn: steps[turn] for turn in range(3)} == {0: 40, 1: 40, 2: 40}
    order = [part.variant_index for part in parts if part.variant_index is not None]
    assert order == [1, 2, 0, 2, 1, 2, 0, 2, 1]
    # Twice the input goes away and comes back: each time queues have to settle.
    assert [part.steps for part in parts if part.variant_index is None] == [
        SETTLE_STEPS,
        30,
        30,
        SETTLE_STEPS,
    ] * 2


def test_few_steps_are_long_and_settle_half_as_often() -> None:
    few, many = (schedule_slots((REAL, BARRIER), plan(steps=n, warmup_steps=3)) for n in (5, 20))
    assert [part.variant_index for part in few] == [0, None, 1, None, 0]
    assert [part.steps for part in few if part.variant_index is not None] == [3, 6, 3]
    assert len([part for part in many if part.variant_index is None]) == 4


def test_every_loader_worker_makes_equally_many_batches_in_a_slot() -> None:
    for workers, steps in ((0, 13), (2, 14), (5, 15), (16, 16), (27, 13)):
        parts = schedule_slots(
            (REAL, BARRIER), plan(steps=50, warmup_steps=5).edit(workers=workers)
        )
        assert {part.steps % steps for part in parts if part.variant_index is not None} == {0}
    # Three batches a step: of six workers, each has made one after two steps.
    three = plan(steps=50).edit(workers=6, accumulate=3)
    assert round_to_loader_cycle(1, three, most=50) == 2


def test_a_first_slot_with_interventions_settles_first() -> None:
    parts = schedule_slots((BARRIER,), plan(steps=2 * MAX_CYCLES, warmup_steps=10))
    assert parts == (Slot(None, SETTLE_STEPS), Slot(0, 2 * MAX_CYCLES))


def test_a_captured_step_settles_longer_the_first_time_that_it_exchanges_something_else() -> None:
    turns = (REAL, BARRIER, Variant(input="replayed"), REPLAYED)
    for step, anew in (("eager", 0), ("compiled+captured", RECAPTURE_STEPS)):
        parts = schedule_slots(turns, plan(steps=20, warmup_steps=5).edit(step=step))
        settling = [part.steps for part in parts if part.variant_index is None]
        # The barrier, the batches from the host, nothing exchanged; then all the way back.
        back = [SETTLE_STEPS, 5, SETTLE_STEPS]
        assert settling == [SETTLE_STEPS + anew, 5, SETTLE_STEPS + anew, *back * 3]


def test_process_wide_fields_are_kept() -> None:
    requested = Variant(
        input="replayed", exchange="none", host_syncs=False, threads=2, devices=(1, 0), pinned=False
    )
    assert process_wide(requested) == Variant(devices=(1, 0), pinned=False)
    assert not process_wide(REPLAYED)
    assert process_wide(REPLAYED, ("input",)) == Variant(exchange="none")
    assert process_wide(requested, ()) == requested
    assert {"devices", "shares", "independent", "device"}.isdisjoint(SWITCHABLE_FIELDS)
