"""When experiments have their turns."""

from __future__ import annotations

from collections import Counter

from made import plan
from nfold.ablation import Ablation
from nfold.turns import CYCLES, RECORDED, SETTLE, SWITCHED, Part, held, in_rounds, schedule

REAL, BARRIER = Ablation(), Ablation(exchange="barrier")
REPLAYED = Ablation(input="replayed", exchange="none")


def test_everybody_has_as_many_steps_in_an_order_that_turns_round() -> None:
    parts = schedule((REPLAYED, REAL, BARRIER), plan(steps=40, warmup_steps=30))
    steps: Counter[int | None] = Counter()
    for part in parts:
        steps[part.turn] += part.steps
    assert {turn: steps[turn] for turn in range(3)} == {0: 40, 1: 40, 2: 40}
    order = [part.turn for part in parts if part.turn is not None]
    assert order == [1, 2, 0, 2, 1, 2, 0, 2, 1]
    # Twice the input goes away and comes back: each time queues have to settle.
    assert [part.steps for part in parts if part.turn is None] == [SETTLE, 30, 30, SETTLE] * 2


def test_few_steps_are_long_and_settle_half_as_often() -> None:
    few, many = (schedule((REAL, BARRIER), plan(steps=n, warmup_steps=3)) for n in (5, 20))
    assert [part.turn for part in few] == [0, None, 1, None, 0]
    assert [part.steps for part in few if part.turn is not None] == [3, 6, 3]
    assert len([part for part in many if part.turn is None]) == 4


def test_every_worker_of_a_loader_makes_as_many_batches_in_a_turn() -> None:
    for workers, steps in ((0, 13), (2, 14), (5, 15), (16, 16), (27, 13)):
        parts = schedule((REAL, BARRIER), plan(steps=50, warmup_steps=5).edit(workers=workers))
        assert {part.steps % steps for part in parts if part.turn is not None} == {0}
    # Three batches a step: of six workers, each has made one after two steps.
    three = plan(steps=50).edit(workers=6, accumulate=3)
    assert in_rounds(1, three, most=50) == 2


def test_a_first_turn_that_leaves_something_out_settles_first() -> None:
    parts = schedule((BARRIER,), plan(steps=2 * CYCLES, warmup_steps=10))
    assert parts == (Part(None, SETTLE), Part(0, 2 * CYCLES))


def test_a_captured_step_settles_longer_the_first_time_that_it_exchanges_something_else() -> None:
    turns = (REAL, BARRIER, Ablation(input="replayed"), REPLAYED)
    for step, anew in (("eager", 0), ("compiled+captured", RECORDED)):
        parts = schedule(turns, plan(steps=20, warmup_steps=5).edit(step=step))
        settling = [part.steps for part in parts if part.turn is None]
        # The barrier, the batches from the host, nothing exchanged; then all the way back.
        back = [SETTLE, 5, SETTLE]
        assert settling == [SETTLE + anew, 5, SETTLE + anew, *back * 3]


def test_what_cannot_change_is_held() -> None:
    asked = Ablation(
        input="replayed", exchange="none", host_syncs=False, threads=2, devices=(1, 0), pinned=False
    )
    assert held(asked) == Ablation(devices=(1, 0), pinned=False)
    assert not held(REPLAYED)
    assert held(REPLAYED, ("input",)) == Ablation(exchange="none")
    assert held(asked, ()) == asked
    assert {"devices", "shares", "independent", "device"}.isdisjoint(SWITCHED)
