"""Experiments on a workload that share process trees, on the simulated framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from explaining import HOST, SECONDS, Memory, explained, ladder, runner, target
from nfold.ablation import Ablation
from nfold.budget import Budget
from nfold.explain.budget import budget
from nfold.explain.causes.input import Input
from nfold.explain.experiment import Clock, Events, Experiment
from nfold.explain.rung import Rung
from nfold.frameworks.simulated import Script
from nfold.measurement import Cause, Measurement, RankSamples
from nfold.run.options import Options
from nfold.run.run import run
from nfold.turns import held
from nfold.workload import Workload

COSTS: dict[str, Any] = {
    "compute_ms_per_sample": 0.1,
    "input_ms_per_sample": 0.02,
    "latency_ms": 0.8,
    "transfer_ms": 7.0,
    "overlap": 0.5,
    "straggler_ms": 1.5,
    "straggler_rank": 1,
    "contention_ms": 0.7,
    "samples_per_epoch": 2000,
}


def _rows(found: Budget) -> dict[str, float]:
    return {row.cause: row.lost_ms.value for row in (*found.rows, *found.single)}


def test_the_same_costs_are_found_in_fewer_runs() -> None:
    alone, shared = Script(**COSTS), Script(**COSTS, in_turns=True)
    apart, together = explained(alone), explained(shared)
    assert _rows(together) == pytest.approx(_rows(apart))
    assert together.speedup.value == pytest.approx(apart.speedup.value)
    trees = [len(_measured(script)) for script in (alone, shared)]
    assert trees[1] < 0.7 * trees[0]


def _measured(script: Script) -> set[tuple[str, int]]:
    experiment = Experiment(target(script), Clock(SECONDS), Events())
    experiment.run(ladder())
    runs = experiment.measured.runs.values()
    return {(m.folder or m.id, m.repeat) for found in runs for m in found.values()}


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_what_two_processes_differ_by_does_not_count_in_one(seed: int) -> None:
    """Of 5 % of a step of 20 ms: in processes of their own, the slow rank hides in it."""
    noisy = {**COSTS, "process_noise": 0.05, "noise": 0.002, "noise_seed": seed}
    found = {shared: explained(Script(**noisy, in_turns=shared)) for shared in (False, True)}
    width = {}
    for shared, one in found.items():
        (row,) = [row for row in one.rows if row.cause == "imbalance"]
        assert row.lost_ms.low is not None
        assert row.lost_ms.high is not None
        width[shared] = row.lost_ms.high - row.lost_ms.low
        assert row.named is shared
        # Of the 1.5 ms on one rank, what exceeds the mean of both; all where they are told apart.
        assert any(row.lost_ms.low <= lost <= row.lost_ms.high for lost in (0.75, 1.5))
    assert width[True] < width[False] / 5


def _over_after_the_first_turn(usual: Any) -> Any:
    """``run`` for something that ends by itself before the second of its experiments has a turn."""

    def run(*args: Any, turns: tuple[Ablation, ...] = (), **more: Any) -> Measurement:
        found: Measurement = usual(*args, turns=turns, **more)
        if not turns:
            return found
        ranks = []
        for rank in found.ranks:
            (first, *_) = rank.divided(rank.turns, len(turns))
            ranks.append(dataclasses.replace(first, turns=(0,) * len(first.windows)))
        return dataclasses.replace(found, ranks=tuple(ranks))

    return run


def test_what_had_no_turn_before_the_end_is_run_by_itself() -> None:
    script = Script(**COSTS, in_turns=True)
    short = target(script, Memory(), _over_after_the_first_turn(runner(script)))
    experiment = Experiment(short, Clock(SECONDS), Events())
    measured = experiment.run(ladder())
    found = budget("digits", measured, experiment.measured)
    assert _rows(found) == pytest.approx(_rows(explained(Script(**COSTS))))


def test_what_had_its_turns_before_a_run_failed_is_not_run_again() -> None:
    """Each process tree dies after the first half of its cycles: all in it had their turns."""
    script, died = Script(**COSTS, in_turns=True), Cause(text="it met a bus")
    usual, trees = runner(script), 0

    def run(*args: Any, turns: tuple[Ablation, ...] = (), **more: Any) -> Measurement:
        nonlocal trees
        found: Measurement = usual(*args, turns=turns, **more)
        trees += bool(turns)
        if not turns:
            return found
        ranks = [_first_half(rank) for rank in found.ranks]
        return dataclasses.replace(found, status="crashed", cause=died, ranks=tuple(ranks))

    experiment = Experiment(target(script, Memory(), run), Clock(SECONDS), Events())
    measured = experiment.run(ladder())
    found = budget("digits", measured, experiment.measured)
    assert _rows(found) == pytest.approx(_rows(explained(Script(**COSTS))))
    assert trees > 1
    assert not experiment.measured.reasons
    told = {doubt.kind: doubt.text for doubt in found.warnings}
    assert "ended before its time (it met a bus): some were timed for" in told["ended_early"]


def _first_half(rank: RankSamples) -> RankSamples:
    windows = rank.windows[: len(rank.windows) // 2]
    steps = sum(window.steps for window in windows)
    return dataclasses.replace(
        rank, windows=windows, turns=rank.turns[: len(windows)], step_ms=rank.step_ms[:steps]
    )


def test_a_script_that_ends_before_its_steps_are_timed_says_so() -> None:
    script = Script(**COSTS)
    usual = runner(script)

    def run(*args: Any, **more: Any) -> Measurement:
        found: Measurement = usual(*args, **more)
        ranks = [dataclasses.replace(rank, step_ms=rank.step_ms[:7]) for rank in found.ranks]
        return dataclasses.replace(found, ranks=tuple(ranks))

    experiment = Experiment(target(script, run=run), Clock(SECONDS), Events())
    measured = experiment.run(ladder())
    told = {d.kind: d.text for d in budget("digits", measured, experiment.measured).warnings}
    assert "some were timed for 7 steps" in told["ended_early"]
    assert "ended_early" not in {doubt.kind for doubt in explained(script).warnings}


def test_rungs_share_what_their_framework_can_change() -> None:
    shared = target(Script(in_turns=True))
    rung = ladder().unexchanged("replayed", (1, 0))
    whole = Rung(plan=rung.plan.edit(epochs=1))
    assert shared.together(rung) == Rung(plan=rung.plan, ablation=Ablation(devices=(1, 0)))
    assert shared.together(whole) is None
    assert target(Script()).together(rung) is None
    fewer = dataclasses.replace(shared, switches=lambda *_: ("input",))
    assert fewer.together(rung) == Rung(plan=rung.plan, ablation=held(rung.ablation, ("input",)))


@pytest.mark.parametrize("in_turns", [False, True])
def test_turns_that_cannot_share_a_run_are_refused(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, in_turns: bool
) -> None:
    monkeypatch.setattr(
        Script, "from_environment", classmethod(lambda _: Script(in_turns=in_turns))
    )
    plan, options = ladder().plan.edit(steps=5), Options(results=tmp_path)
    turns = (Ablation(input="replayed"), Ablation(devices=(1, 0)))

    def status(*asked: Ablation) -> Any:
        return run(Workload(name="digits"), plan, machine=HOST, options=options, turns=asked)

    assert status(*turns[:1]).status == ("ok" if in_turns else "unsupported")
    refused = status(*turns)
    assert refused.status == "unsupported"
    assert refused.cause is not None
    assert "cannot change between two steps" in refused.cause.text


def _slower_in_the_end(usual: Any, times: float) -> Any:
    """``run`` on a host on which the last quarter of every process tree takes so much longer."""

    def run(*args: Any, **more: Any) -> Measurement:
        found: Measurement = usual(*args, **more)
        ranks = []
        for rank in found.ranks:
            last = len(rank.windows) - len(rank.windows) // 4
            windows = tuple(
                dataclasses.replace(window, seconds=window.seconds * (times if n >= last else 1))
                for n, window in enumerate(rank.windows)
            )
            ranks.append(dataclasses.replace(rank, windows=windows))
        return dataclasses.replace(found, ranks=tuple(ranks))

    return run


class Second(Events):
    """The first rungs of the second round."""

    def __init__(self) -> None:
        self.rungs: list[Rung] = []

    def started(self, rungs: Sequence[Rung], number: int, left_s: float) -> None:
        del left_s
        self.rungs = self.rungs or [*rungs] * (number == 1)


@pytest.mark.parametrize(("times", "unsteady"), [(1.0, False), (1.5, True)])
def test_on_an_unsteady_host_the_real_run_has_another_tree_before_what_is_new(
    times: float, *, unsteady: bool
) -> None:
    script = Script(**COSTS, in_turns=True)
    usual, second = runner(script), Second()
    drifting = target(script, Memory(), _slower_in_the_end(usual, times))
    experiment = Experiment(drifting, Clock(SECONDS), second)
    measured = experiment.run(ladder())
    assert (measured.full() in second.rungs) == unsteady
    told = {doubt.kind for doubt in budget("digits", measured, experiment.measured).warnings}
    assert ("unsteady" in told) == unsteady


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_without_its_input_a_step_is_what_it_is_with_batches_given_again(seed: int) -> None:
    """Of runs of which no two are alike: what other rungs scatter by is in no promise."""
    noisy = {**COSTS, "noise": 0.02, "process_noise": 0.05, "noise_seed": seed, "in_turns": True}
    experiment = Experiment(target(Script(**noisy)), Clock(SECONDS), Events())
    asked = experiment.run(ladder(workers=4))
    view = experiment.measured.fit().view
    gone = view.step(asked.full()) - view.step(asked.full("replayed"))
    assert gone > 0
    assert Input().whole_ms(asked, view) == pytest.approx(gone)
