"""Experiments on a workload that share process trees, on the simulated framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from explaining import HOST, SECONDS, Memory, experiment_design, explained, runner, target
from nfold.core.interleave import process_wide
from nfold.core.measurement import FailureCause, Measurement, RankSamples
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.simulated import Scenario
from nfold.explain.attribution import build_budget
from nfold.explain.causes.input_pipeline import INPUT
from nfold.explain.design import Trial, no_allreduce
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.result.budget import Budget
from nfold.explain.time_budget import TimeBudget
from nfold.launch.launch_spec import RunOptions
from nfold.launch.workload_run import run

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
    return {row.cause: row.lost_ms.value for row in (*found.rows, *found.one_device_rows)}


def test_the_same_costs_are_found_in_fewer_runs() -> None:
    alone, shared = Scenario(**COSTS), Scenario(**COSTS, can_interleave=True)
    apart, together = explained(alone), explained(shared)
    assert _rows(together) == pytest.approx(_rows(apart))
    assert together.speedup.value == pytest.approx(apart.speedup.value)
    trees = [len(_measured(script)) for script in (alone, shared)]
    assert trees[1] < 0.7 * trees[0]


def _measured(script: Scenario) -> set[tuple[str, int]]:
    experiment = Experiment(target(script), TimeBudget(SECONDS), ExperimentEvents())
    experiment.run(experiment_design())
    runs = experiment.results.runs.values()
    return {(m.folder or m.id, m.repeat) for found in runs for m in found.values()}


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_what_two_processes_differ_by_does_not_count_in_one(seed: int) -> None:
    """Of 5 % of a step of 20 ms: in processes of their own, the slow rank hides in it."""
    noisy = {**COSTS, "process_noise": 0.05, "noise": 0.002, "noise_seed": seed}
    found = {
        shared: explained(Scenario(**noisy, can_interleave=shared)) for shared in (False, True)
    }
    width = {}
    for shared, one in found.items():
        (row,) = [row for row in one.rows if row.cause == "imbalance"]
        assert row.lost_ms.low is not None
        assert row.lost_ms.high is not None
        width[shared] = row.lost_ms.high - row.lost_ms.low
        assert row.significant is shared
        # Of the 1.5 ms on one rank, what exceeds the mean of both; all where they are told apart.
        assert any(row.lost_ms.low <= lost <= row.lost_ms.high for lost in (0.75, 1.5))
    assert width[True] < width[False] / 5


def _over_after_the_first_turn(usual: Any) -> Any:
    """``run`` for something that ends by itself before the second of its experiments has a turn."""

    def run(*args: Any, interleaved_variants: tuple[Variant, ...] = (), **more: Any) -> Measurement:
        found: Measurement = usual(*args, interleaved_variants=interleaved_variants, **more)
        if not interleaved_variants:
            return found
        ranks = []
        for rank in found.ranks:
            (first, *_) = rank.split_windows(rank.slots, len(interleaved_variants))
            ranks.append(dataclasses.replace(first, slots=(0,) * len(first.windows)))
        return dataclasses.replace(found, ranks=tuple(ranks))

    return run


def test_what_had_no_turn_before_the_end_is_run_by_itself() -> None:
    script = Scenario(**COSTS, can_interleave=True)
    short = target(script, Memory(), _over_after_the_first_turn(runner(script)))
    experiment = Experiment(short, TimeBudget(SECONDS), ExperimentEvents())
    measured = experiment.run(experiment_design())
    found = build_budget("digits", measured, experiment.results)
    assert _rows(found) == pytest.approx(_rows(explained(Scenario(**COSTS))))


def test_what_had_its_turns_before_a_run_failed_is_not_run_again() -> None:
    """Each process tree dies after the first half of its cycles: all in it had their turns."""
    script, died = Scenario(**COSTS, can_interleave=True), FailureCause(text="it met a bus")
    usual, trees = runner(script), 0

    def run(*args: Any, interleaved_variants: tuple[Variant, ...] = (), **more: Any) -> Measurement:
        nonlocal trees
        found: Measurement = usual(*args, interleaved_variants=interleaved_variants, **more)
        trees += bool(interleaved_variants)
        if not interleaved_variants:
            return found
        ranks = [_first_half(rank) for rank in found.ranks]
        return dataclasses.replace(found, status="crashed", cause=died, ranks=tuple(ranks))

    experiment = Experiment(target(script, Memory(), run), TimeBudget(SECONDS), ExperimentEvents())
    measured = experiment.run(experiment_design())
    found = build_budget("digits", measured, experiment.results)
    assert _rows(found) == pytest.approx(_rows(explained(Scenario(**COSTS))))
    assert trees > 1
    assert not experiment.results.reasons
    told = {doubt.kind: doubt.text for doubt in found.caveats}
    assert "ended early (it met a bus)" in told["ended_early"]


def _first_half(rank: RankSamples) -> RankSamples:
    windows = rank.windows[: len(rank.windows) // 2]
    steps = sum(window.steps for window in windows)
    return dataclasses.replace(
        rank, windows=windows, slots=rank.slots[: len(windows)], step_ms=rank.step_ms[:steps]
    )


def test_a_script_that_ends_before_its_steps_are_timed_says_so() -> None:
    script = Scenario(**COSTS)
    usual = runner(script)

    def run(*args: Any, **more: Any) -> Measurement:
        found: Measurement = usual(*args, **more)
        ranks = [dataclasses.replace(rank, step_ms=rank.step_ms[:7]) for rank in found.ranks]
        return dataclasses.replace(found, ranks=tuple(ranks))

    experiment = Experiment(target(script, run=run), TimeBudget(SECONDS), ExperimentEvents())
    measured = experiment.run(experiment_design())
    told = {d.kind: d.text for d in build_budget("digits", measured, experiment.results).caveats}
    assert "some trials have 7 timed steps" in told["ended_early"]
    assert "ended_early" not in {doubt.kind for doubt in explained(script).caveats}


def test_trials_share_what_their_framework_can_change() -> None:
    shared = target(Scenario(can_interleave=True))
    trial = no_allreduce(experiment_design(), "replayed", (1, 0))
    whole = Trial(plan=trial.plan.edit(epochs=1))
    assert shared.shared_trial(trial) == Trial(plan=trial.plan, variant=Variant(devices=(1, 0)))
    assert shared.shared_trial(whole) is None
    assert target(Scenario()).shared_trial(trial) is None
    fewer = dataclasses.replace(shared, switchable_fields=lambda *_: ("input",))
    assert fewer.shared_trial(trial) == Trial(
        plan=trial.plan, variant=process_wide(trial.variant, ("input",))
    )


@pytest.mark.parametrize("in_turns", [False, True])
def test_turns_that_cannot_share_a_run_are_refused(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, in_turns: bool
) -> None:
    monkeypatch.setattr(
        Scenario, "from_environment", classmethod(lambda _: Scenario(can_interleave=in_turns))
    )
    plan, options = experiment_design().plan.edit(steps=5), RunOptions(results=tmp_path)
    turns = (Variant(input="replayed"), Variant(devices=(1, 0)))

    def status(*asked: Variant) -> Any:
        return run(
            Workload(name="digits"), plan, machine=HOST, options=options, interleaved_variants=asked
        )

    assert status(*turns[:1]).status == ("ok" if in_turns else "unsupported")
    refused = status(*turns)
    assert refused.status == "unsupported"
    assert refused.cause is not None
    assert "cannot be interleaved" in refused.cause.text


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


class Second(ExperimentEvents):
    """The first trials of the second round."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []

    def started(self, trials: Sequence[Trial], number: int, left_s: float) -> None:
        del left_s
        self.trials = self.trials or [*trials] * (number == 1)


@pytest.mark.parametrize(("times", "unsteady"), [(1.0, False), (1.5, True)])
def test_on_an_unsteady_host_the_real_run_has_another_tree_before_what_is_new(
    times: float, *, unsteady: bool
) -> None:
    script = Scenario(**COSTS, can_interleave=True)
    usual, second = runner(script), Second()
    drifting = target(script, Memory(), _slower_in_the_end(usual, times))
    experiment = Experiment(drifting, TimeBudget(SECONDS), second)
    measured = experiment.run(experiment_design())
    assert (measured.actual() in second.trials) == unsteady
    told = {doubt.kind for doubt in build_budget("digits", measured, experiment.results).caveats}
    assert ("unsteady" in told) == unsteady


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_without_its_input_a_step_is_what_it_is_with_batches_given_again(seed: int) -> None:
    """Of runs of which no two are alike: what other trials scatter by is in no promise."""
    noisy = {
        **COSTS,
        "noise": 0.02,
        "process_noise": 0.05,
        "noise_seed": seed,
        "can_interleave": True,
    }
    experiment = Experiment(target(Scenario(**noisy)), TimeBudget(SECONDS), ExperimentEvents())
    asked = experiment.run(experiment_design(workers=4))
    view = experiment.results.fit().view
    gone = view.step(asked.actual()) - view.step(asked.actual("replayed"))
    assert gone > 0
    assert INPUT.costs(asked).total_ms(view) == pytest.approx(gone)
