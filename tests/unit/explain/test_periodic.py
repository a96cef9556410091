"""What comes after some steps only: found by the host's pauses, counted by the devices' clocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from made import machine, plan
from nfold.core.measurement import Measurement, RankSamples, Window
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.explain.design import Trial
from nfold.explain.metrics import compute_metrics
from nfold.explain.periodic import (
    PeriodicWork,
    find_periodic_work,
    host_gap_metrics,
    periodic_metrics,
    without_affected_steps,
)

HOST = machine()
PLAN = plan(HOST, devices=2, batch=16, steps=100)
TRIAL = Trial(plan=PLAN)
OTHER = Trial(plan=PLAN, variant=Variant(exchange="none"))
WARMUP, STEPS, WINDOW = 10, 100, 10
STEP_MS = 10.0
Steps = dict[int, float]


TURNS = [
    (5, ((20.0, 70.0), (0.1, 150.0))),
    (3, ((20.0, 70.0), (0.1, 150.0))),
    (5, ((20.0, 70.0), (0.1, 400.0), (9.0, 150.0))),
]


def _rank(number: int, pauses: Steps, more: Steps, first: int = WARMUP, last: int = 0) -> Any:
    """Steps of 10 ms, and of some by how many milliseconds they are longer."""
    steps = range(first, last or WARMUP + STEPS)
    step_ms = tuple(STEP_MS + more.get(step, 0.0) for step in steps)
    windows = tuple(
        Window(
            start_s=0.0,
            seconds=sum(step_ms[at : at + WINDOW]) / 1e3,
            steps=len(step_ms[at : at + WINDOW]),
            samples=8 * len(step_ms[at : at + WINDOW]),
            first_step=first + at,
        )
        for at in range(0, len(step_ms), WINDOW)
    )
    return RankSamples(
        rank=number,
        device="cpu",
        warmup_steps=WARMUP,
        windows=windows,
        step_ms=step_ms,
        host_gaps_ms=tuple(pauses.get(step, 0.01) for step in range(WARMUP + STEPS)),
    )


def _of(*ranks: RankSamples, **changes: Any) -> Measurement:
    asked = PLAN.edit(**changes) if changes else PLAN
    return Measurement(
        id="m",
        workload=Workload(name="train.py", script=("train.py",)),
        plan=asked,
        machine=HOST,
        status="ok",
        ranks=ranks,
    )


def _every(distance: int, ms: float, first: int = 0) -> Steps:
    return {step: ms for step in range(first, WARMUP + STEPS) if step % distance == 0}


def _found(*ranks: RankSamples) -> PeriodicWork:
    return find_periodic_work({TRIAL: _of(*ranks)})[TRIAL]


def test_what_one_rank_does_every_fifth_step_is_in_no_usual_step() -> None:
    paused = _every(5, 50.0)
    measured = _of(_rank(0, paused, paused), _rank(1, {}, paused))
    found = find_periodic_work({TRIAL: measured})[TRIAL]
    assert found.ms_per_step == pytest.approx(10.0)
    assert found.period == pytest.approx(5)
    assert found.affected_steps == {step for step in paused if step >= WARMUP}
    rest = without_affected_steps(measured, found)
    assert [sum(w.steps for w in rank.windows) for rank in rest.ranks] == [80, 80]
    assert [sum(w.samples for w in rank.windows) for rank in rest.ranks] == [640, 640]
    assert all(rank.step_ms == (STEP_MS,) * 80 for rank in rest.ranks)
    assert compute_metrics(rest, ranks_synchronize=True)["step"] == pytest.approx(STEP_MS)
    assert compute_metrics(measured, ranks_synchronize=True)["step"] == pytest.approx(
        STEP_MS + 10.0
    )
    assert periodic_metrics(found, [found]) == {
        "periodic": pytest.approx(10.0),
        "period": pytest.approx(5),
    }


@pytest.mark.parametrize(("length", "every"), [(50, 20), (27, 10), (35, 15)])
def test_what_is_counted_anew_in_every_pass_is_found_in_each(length: int, every: int) -> None:
    """A log after every 20th batch of an epoch of 50: 20, 30, 20 steps lie between two of them."""
    places = {step: step % length for step in range(WARMUP + STEPS)}
    paused = {step: 40.0 for step, at in places.items() if at and at % every == 0}
    starts = tuple(step for step, at in places.items() if step and not at)
    one = dataclasses.replace(_rank(0, paused, paused), epoch_starts=starts)
    found = _found(one, dataclasses.replace(_rank(1, paused, paused), epoch_starts=starts))
    late = {step for step in paused if step >= WARMUP}
    assert found.affected_steps == late
    assert found.ms_per_step == pytest.approx(40.0 * len(late) / STEPS)


def test_a_pause_in_a_pass_that_others_lack_is_chance() -> None:
    late = dict.fromkeys((13, 37, 71, 88), 40.0)
    ranks = [dataclasses.replace(_rank(r, late, late), epoch_starts=(50, 100)) for r in (0, 1)]
    assert _found(*ranks) == PeriodicWork(STEPS)


def test_what_its_devices_do_not_wait_for_costs_nothing() -> None:
    """They had enough to do for as long as the host was away."""
    found = _found(_rank(0, _every(5, 50.0), {}), _rank(1, {}, {}))
    assert found == PeriodicWork(STEPS)
    assert periodic_metrics(found, [found]) == {"periodic": 0.0}


def test_long_steps_without_a_pause_before_them_are_steps() -> None:
    """A worker's late batch, every fifth."""
    late = _every(5, 50.0)
    found = _found(_rank(0, {}, late), _rank(1, {}, late))
    assert found == PeriodicWork(STEPS)


def test_what_comes_often_is_told_apart_from_what_comes_rarely() -> None:
    """A log of 5 ms after every 10th step, an evaluation of 300 after every 50th."""
    paused = {**_every(10, 5.0), **_every(50, 305.0)}
    found = _found(_rank(0, paused, paused), _rank(1, {}, paused))
    assert found.ms_per_step == pytest.approx(5 / 10 + 300 / 50)
    assert found.period == pytest.approx(50)
    assert max(1 / event.rate for event in found.events) == pytest.approx(50)


@pytest.mark.parametrize(
    "paused",
    [
        (20, 33, 40, 52, 81),
        (44,),
        (60, 70),
        (40, 85),
        (20, 21, 24, 30, 31, 33, 57, 58, 70, 71, 73, 90),
    ],
)
def test_what_comes_by_chance_does_not_recur(paused: tuple[int, ...]) -> None:
    """Two at a distance of ten are chance, too: in 100 steps there would be ten. So are two at one
    of 45 that the first step has not: who counts has a pause after 45 of them, and after 90.
    """
    late = dict.fromkeys(paused, 24.0)
    found = _found(_rank(0, late, late), _rank(1, {}, late))
    assert found == PeriodicWork(STEPS)


def test_a_rank_whose_host_waits_for_another_one_pauses_a_step_later() -> None:
    """Its devices wait in the step after rank 0's pause, and its host before the next."""
    paused = _every(20, 200.0)
    waits = {step + 1: ms for step, ms in paused.items()}
    found = _found(_rank(0, paused, paused), _rank(1, waits, paused))
    assert found.ms_per_step == pytest.approx(10.0)
    assert found.affected_steps == {step for step in paused if step >= WARMUP}


def test_what_ranks_do_at_different_times_adds_up() -> None:
    first, second = _every(20, 200.0), {step + 5: 100.0 for step in range(0, 110, 20)}
    late = {**first, **second}
    assert _found(_rank(0, first, late), _rank(1, second, late)).ms_per_step == pytest.approx(15.0)


@pytest.mark.parametrize("after", [(45, 90), (46, 91), (43, 88), (44, 89)])
def test_two_that_a_script_counts_recur(after: tuple[int, ...]) -> None:
    """The last two of a script without an optimizer: its first two backwards are no steps."""
    late = dict.fromkeys(after, 90.0)
    assert _found(_rank(0, late, late), _rank(1, {}, late)).ms_per_step == pytest.approx(2.0)


def test_passes_over_the_data_may_count_anew() -> None:
    """Passes of 35 steps, in each of which something comes after the 10th, 20th and 30th."""
    paused = {s: 30.0 for s in range(WARMUP, WARMUP + STEPS) if s % 35 in (10, 20, 30)}
    found = _found(_rank(0, paused, paused), _rank(1, {}, paused))
    assert found.ms_per_step == pytest.approx(30 * 3 / 35, rel=0.05)
    assert found.affected_steps == set(paused)


def test_short_epochs_may_count_anew() -> None:
    """After every 20th step of epochs of 30, the first one too: two of three at distances of 10."""
    paused = {step: ms for step, ms in _every(10, 30.0).items() if step % 30 != 10}
    found = _found(_rank(0, paused, paused), _rank(1, {}, paused))
    assert found.ms_per_step == pytest.approx(30 * 2 / 30, rel=0.15)
    assert 40 not in found.affected_steps


def test_the_rank_that_is_delayed_most_counts() -> None:
    paused = _every(10, 20.0)
    found = _found(_rank(0, paused, _every(10, 20.0)), _rank(1, paused, _every(10, 30.0)))
    assert found.ms_per_step == pytest.approx(3.0)


def test_a_tree_that_was_too_short_for_what_another_has_seen_tells_nothing() -> None:
    paused = _every(50, 300.0)
    long = _found(_rank(0, paused, paused), _rank(1, {}, paused))
    short = PeriodicWork(steps=60)
    assert periodic_metrics(short, [short]) == {"periodic": 0.0}
    assert periodic_metrics(short, [short, long]) == {}
    assert periodic_metrics(PeriodicWork(steps=100), [short, long]) == {"periodic": 0.0}


def test_a_turn_whose_host_does_not_wait_has_them_all_the_same() -> None:
    """In half of the steps the host goes on, and only the devices are late."""
    more = _every(5, 50.0)
    paused = {step: ms for step, ms in more.items() if step < 60}
    ranks = [_rank(0, paused, more, last=60), _rank(1, {}, more, last=60)]
    others = [_rank(0, paused, more, first=60), _rank(1, {}, more, first=60)]
    found = find_periodic_work({TRIAL: _of(*ranks), OTHER: _of(*others)})
    assert found[TRIAL] == found[OTHER]
    assert found[OTHER].ms_per_step == pytest.approx(10.0)
    assert {60, 65, 105} <= found[OTHER].affected_steps
    rest = without_affected_steps(_of(*others), found[OTHER])
    assert compute_metrics(rest, ranks_synchronize=True)["step"] == pytest.approx(STEP_MS)


@pytest.mark.parametrize(("distance", "lengths"), TURNS)
def test_turns_whose_hosts_wait_differently_are_read_each_by_its_own(
    distance: int, lengths: tuple[tuple[float, float], ...]
) -> None:
    """The usual pause and the one before what recurs, of turns that take ten steps each: a host
    that waits for its devices pauses for most of a step, one that is ahead waits for them then.
    """
    more = _every(distance, 10.0 * distance)
    by_turn = [lengths[step // WINDOW % len(lengths)] for step in range(WARMUP + STEPS)]
    paused = {step: pair[step in more] for step, pair in enumerate(by_turn)}
    whole = [_rank(0, paused, more), _rank(1, {}, more)]
    turns = [n % len(lengths) for n in range(1, 1 + STEPS // WINDOW)]
    parts = [rank.split_windows(turns, len(lengths)) for rank in whole]
    trials = [TRIAL, OTHER, Trial(plan=PLAN, variant=Variant(host_syncs=False))]
    members = {
        trial: _of(*ranks) for trial, ranks in zip(trials, zip(*parts, strict=True), strict=False)
    }
    found = find_periodic_work(members)
    assert set(found) == set(members)
    assert {round(one.ms_per_step, 6) for one in found.values()} == {10.0}
    assert found[TRIAL].affected_steps == {step for step in more if step >= WARMUP}


def test_the_usual_pause_is_none_however_long_it_is() -> None:
    """A host that reads its loss after every step; then more than scatter is unusual."""
    usual = {step: 6.0 + step % 3 for step in range(WARMUP + STEPS)}
    quiet = _found(_rank(0, usual, {}), _rank(1, usual, {}))
    assert quiet == PeriodicWork(STEPS)
    paused = {**usual, **_every(20, 40.0)}
    found = _found(_rank(0, paused, _every(20, 30.0)), _rank(1, usual, _every(20, 30.0)))
    assert found.ms_per_step == pytest.approx(1.5)


def test_where_nobody_saw_when_batches_were_asked_for_nothing_is_told() -> None:
    rank = dataclasses.replace(_rank(0, {}, {}), host_gaps_ms=())
    assert find_periodic_work({TRIAL: _of(rank, _rank(1, {}, {}))}) == {}


def test_whole_epochs_count_what_lies_in_no_window_by_themselves() -> None:
    paused = _every(5, 50.0)
    measured = _of(_rank(0, paused, paused), _rank(1, {}, paused), steps=None, epochs=2)
    assert find_periodic_work({TRIAL: measured}) == {}


def test_a_run_of_nothing_else_stays_as_it_is() -> None:
    """In windows of one step, each of them after a pause, there is no usual one."""
    measured = _of(_rank(0, {}, {}), _rank(1, {}, {}))
    all_apart = PeriodicWork(STEPS, affected_steps=frozenset(range(WARMUP + STEPS)))
    assert without_affected_steps(measured, all_apart) == measured
    assert without_affected_steps(measured, None) == measured


@pytest.mark.parametrize(
    ("paused", "usual"),
    [
        (dict.fromkeys(range(WARMUP + STEPS), 8.0), 8.0),
        (dict.fromkeys(range(0, WARMUP + STEPS, 2), 8.0), 4.005),
        ({**dict.fromkeys(range(WARMUP + STEPS), 8.0), **_every(5, 90.0)}, 8.0),
    ],
)
def test_what_a_host_does_before_every_step_is_read_on_the_rank_where_it_is_least(
    paused: Steps, usual: float
) -> None:
    """Every second one is no other kind of step; every fifth is, and counted by itself."""
    ranks = _rank(0, paused, paused), _rank(1, {s: 2 * ms for s, ms in paused.items()}, {})
    measured = _of(*ranks)
    found = find_periodic_work({TRIAL: measured})[TRIAL]
    assert host_gap_metrics(measured, found) == {"host_gap": pytest.approx(usual)}
    assert (
        host_gap_metrics(_of(dataclasses.replace(ranks[0], host_gaps_ms=()), ranks[1]), found) == {}
    )


@pytest.mark.parametrize("first", [0, 1])
def test_every_second_step_is_half_of_every_step(first: int) -> None:
    """Whichever of the two kinds has one more."""
    late = dict.fromkeys(range(first, WARMUP + STEPS, 2), 20.0)
    ranks = [_rank(rank, late, late, last=WARMUP + STEPS - 1) for rank in (0, 1)]
    ranks = [dataclasses.replace(rank, host_gaps_ms=rank.host_gaps_ms[:-1]) for rank in ranks]
    found = find_periodic_work({TRIAL: _of(*ranks)})[TRIAL]
    assert found == PeriodicWork(STEPS - 1)
    assert host_gap_metrics(_of(*ranks), found)["host_gap"] == pytest.approx(10.0, abs=0.5)
