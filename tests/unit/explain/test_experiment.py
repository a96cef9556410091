"""The experiment: time, failures, what was measured before, what is asked for next."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from explaining import Memory, experiment_design, failed, runner, target
from nfold.core import interleave
from nfold.core.errors import RunFailure
from nfold.core.measurement import Measurement
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile
from nfold.core.stats import Interval
from nfold.core.variant import Variant
from nfold.engines.simulated import Scenario
from nfold.explain import planner
from nfold.explain.attribution import FindingBuilder, build_budget
from nfold.explain.cause_costs import Attribution
from nfold.explain.causes import CAUSES_BY_ID
from nfold.explain.design import ExperimentDesign, Trial, barrier_only, with_expandable_segments
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.result.budget import NOT_ENOUGH_TIME, AccountRow, BreakEvenBatch, Finding
from nfold.explain.result.view import build_view
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import TrialResults, WorkloadRunner
from nfold.launch.launch_spec import StopRequest

SCRIPT = Scenario(compute_ms_per_sample=0.1, exchange_ms=2.0, samples_per_epoch=2000)


class Ticking:
    """A clock on which every run takes a second."""

    def __init__(self, run: Any) -> None:
        self.now, self._run = 0.0, run

    def __call__(self, *args: Any, **kwargs: Any) -> Measurement:
        self.now += 1
        measurement: Measurement = self._run(*args, **kwargs)
        return measurement


class Noting(ExperimentEvents):
    def __init__(self) -> None:
        self.runs: list[tuple[Trial, int]] = []
        self.trees: list[tuple[Trial, ...]] = []

    def finished(
        self, trials: Sequence[Trial], number: int, found: Sequence[Measurement], left_s: float
    ) -> None:
        self.runs += [(trial, number) for trial in trials]
        self.trees.append(tuple(trials))


def _experiment(
    seconds: float, store: Memory | None = None, stop: StopRequest | None = None
) -> tuple[Experiment, Ticking, Noting]:
    ticking, noting = Ticking(runner(SCRIPT)), Noting()
    clock = TimeBudget(seconds, now=lambda: ticking.now)
    made = Experiment(target(SCRIPT, store, ticking), clock, noting, stop or StopRequest())
    return made, ticking, noting


def test_a_budget_that_is_too_short_gives_a_partial_answer_and_says_so() -> None:
    experiment, ticking, _ = _experiment(6.0)
    found = build_budget("digits", experiment.run(experiment_design()), experiment.results)
    assert ticking.now <= 6.0
    assert found.speedup.value == pytest.approx(20 / 12)
    assert NOT_ENOUGH_TIME in dict(found.unmeasured).values()


def test_what_there_was_no_time_for_is_said_before_a_smaller_row() -> None:
    """1 ms is lost between epochs; time is over before anything of an exchange is known."""
    rows = [_costing("epoch-boundary", 1.0, named=True)]
    whole = build_budget("digits", *_measured_alone())
    assert ("link", NOT_ENOUGH_TIME) in whole.unmeasured
    found = dataclasses.replace(whole, rows=tuple(rows), not_attributed_ms=Interval(5.0, 4.0, 6.0))
    slower = BreakEvenBatch(devices_help=False, batch=None, evidence=())
    assert not dataclasses.replace(found, break_even_batch=slower).devices_cannot_help
    assert dataclasses.replace(found, break_even_batch=slower, unmeasured=()).devices_cannot_help


def test_where_no_row_has_a_name_it_is_said_where_most_is() -> None:
    whole = build_budget("digits", *_measured_alone())
    assert whole.account is not None
    compute = AccountRow(id="compute", ms=Interval(7.0, 6.9, 7.1))
    rest = AccountRow(id="not-attributed", ms=Interval(5.0, 4.0, 6.0))
    account = dataclasses.replace(whole.account, rows=(compute, rest))
    view = build_view(dataclasses.replace(whole, account=account))
    assert view.tone == "unknown"
    assert view.headline == "5.00 of 12.0 ms per step (42 %) are not attributed yet."
    rest = dataclasses.replace(rest, ms=Interval(0.1, 0.05, 0.15))
    account = dataclasses.replace(account, rows=(compute, rest))
    view = build_view(dataclasses.replace(whole, account=account))
    assert view.tone == "unknown"
    assert dict(whole.unmeasured)["link"] == NOT_ENOUGH_TIME


def _measured_alone() -> tuple[ExperimentDesign, TrialResults]:
    """Both ends of the design, and no time for more."""
    experiment, _, _ = _experiment(2.0)
    return experiment.run(experiment_design()), experiment.results


def test_even_without_time_the_speedup_is_measured() -> None:
    experiment, ticking, _ = _experiment(0.5)
    found = build_budget("digits", experiment.run(experiment_design()), experiment.results)
    assert ticking.now == 3.0
    assert found.speedup.value == pytest.approx(20 / 12)
    assert [doubt.kind for doubt in found.caveats] == ["few_repeats"]
    unmeasured = [cause for cause, reason in found.unmeasured if reason == NOT_ENOUGH_TIME]
    assert unmeasured[:3] == ["launch-bound", "imbalance", "link"]


def test_trials_are_repeated_in_rounds_of_another_order() -> None:
    experiment, _, noting = _experiment(1000.0)
    experiment.run(experiment_design())
    rounds = {n: [trial for trial, number in noting.runs if number == n] for n in (1, 2)}
    assert set(rounds[1]) == set(rounds[2])
    assert rounds[1] != rounds[2]
    assert all(len(set(trials)) == len(trials) for trials in rounds.values())


@pytest.mark.parametrize(("missing_s", "left_out"), [(0.1, 0), (0.3, 1)])
def test_what_nobody_has_measured_may_take_a_little_more(missing_s: float, left_out: int) -> None:
    """Every run takes a second: the last new one has 0.9 or 0.7 s, and no old one is repeated."""
    whole, _, every = _experiment(1000.0)
    whole.run(experiment_design())
    count = len([number for _, number in every.runs if not number])
    experiment, _, noting = _experiment(count - missing_s)
    experiment.run(experiment_design())
    assert [number for _, number in noting.runs] == [0] * (count - left_out)


def test_fixes_of_what_was_found_come_before_anything_is_repeated() -> None:
    experiment, _, noting = _experiment(1000.0)
    asked = experiment.run(experiment_design())
    fixes = set(CAUSES_BY_ID["link"].fixes(asked).values())
    second = [trial for trial, number in noting.runs if number == 1]
    assert fixes
    assert set(second[: len(fixes)]) == fixes


def test_what_was_measured_before_is_not_run_again() -> None:
    store = Memory()
    first, _, noting = _experiment(14.0, store)
    first.run(experiment_design())
    done = len(store.kept)
    second, ticking, again = _experiment(1000.0, store)
    second.run(experiment_design())
    assert ticking.now == len(store.kept) - done
    assert again.runs[:2] == noting.runs[:2]


def _time_limits(design: ExperimentDesign, *, shared: bool) -> list[float]:
    """Return the time limits of all runs of an experiment with 1000 s."""
    limits: list[float] = []
    usual = runner(SCRIPT)

    def run(workload: Any, plan: Any, ablation: Any = None, **more: Any) -> Measurement:
        limits.append(more["options"].time_limit_s)
        measurement: Measurement = usual(workload, plan, ablation, **more)
        return measurement

    found = target(SCRIPT, run=run)
    budget = TimeBudget(1000.0)
    Experiment(Sharing.of(found) if shared else found, budget, ExperimentEvents()).run(design)
    return limits


@pytest.mark.parametrize("shared", [False, True])
def test_only_a_run_without_which_nothing_can_be_said_may_exceed_the_budget(shared: bool) -> None:
    pilot, on_all_devices, *others = limits = _time_limits(experiment_design(), shared=shared)
    assert all(0 < limit <= 1010 or 1900 < limit <= 2000 for limit in limits)
    assert pilot > 1900
    assert on_all_devices < 1010  # half of what is left: the run on one device needs as much
    assert sum(limit > 1900 for limit in others) == 1
    assert others[-1] < 1010


def test_steps_that_are_slower_than_those_of_the_probe_run_do_not_take_all_of_the_time() -> None:
    design = dataclasses.replace(experiment_design(), start_s=1.0)
    _, on_all_devices, on_one, *_ = _time_limits(design, shared=False)
    assert on_all_devices <= 500
    assert 500 < on_one <= 1000


def test_a_request_to_stop_ends_it_with_what_there_is() -> None:
    stop = StopRequest(signum=2)
    experiment, ticking, _ = _experiment(1000.0, stop=stop)
    found = build_budget("digits", experiment.run(experiment_design()), experiment.results)
    assert ticking.now == 3.0
    assert found.unmeasured


def test_a_run_that_ends_because_of_a_request_to_stop_is_not_tried_again() -> None:
    stop, asked = StopRequest(), 0

    def run(workload: Any, plan: Any, ablation: Any = None, **_: Any) -> Measurement:
        nonlocal asked
        asked += 1
        stop.signum = 2
        return failed(Trial(plan=plan), "nfold got SIGINT")

    experiment = Experiment(target(SCRIPT, run=run), TimeBudget(1000.0), ExperimentEvents(), stop)
    with pytest.raises(RunFailure):
        experiment.run(experiment_design())
    assert asked == 1


def test_a_trial_that_fails_is_left_out_with_its_reason_and_not_tried_again() -> None:
    asked: list[Variant | None] = []
    usual = runner(SCRIPT)

    def run(workload: Any, plan: Any, ablation: Any = None, **more: Any) -> Measurement:
        asked.append(ablation)
        if ablation and ablation.exchange == "barrier":
            return failed(Trial(plan=plan, variant=ablation), "no room")
        measurement: Measurement = usual(workload, plan, ablation, **more)
        return measurement

    experiment = Experiment(target(SCRIPT, run=run), TimeBudget(1000.0), ExperimentEvents())
    found = build_budget("digits", experiment.run(experiment_design()), experiment.results)
    reasons = dict(found.unmeasured)
    assert reasons["link"] == reasons["synchronization"] == "crashed: no room"
    assert found.speedup.value == pytest.approx(20 / 12)
    assert found.not_attributed_ms.value == pytest.approx(2)
    assert sum(bool(a and a.exchange == "barrier") for a in asked) == 1


def test_a_plan_that_fails_cannot_be_explained() -> None:
    def run(workload: Any, plan: Any, ablation: Any = None, **_: Any) -> Measurement:
        return failed(Trial(plan=plan), "no room")

    experiment = Experiment(target(SCRIPT, run=run), TimeBudget(1000.0), ExperimentEvents())
    with pytest.raises(RunFailure, match="2 devices, batch 200: crashed: no room"):
        experiment.run(experiment_design())


def test_a_plan_that_fails_once_is_tried_again() -> None:
    usual, asked = runner(SCRIPT), 0

    def run(workload: Any, plan: Any, ablation: Any = None, **more: Any) -> Measurement:
        nonlocal asked
        asked += 1
        if asked == 2:
            return failed(Trial(plan=plan), "the port was taken")
        measurement: Measurement = usual(workload, plan, ablation, **more)
        return measurement

    experiment = Experiment(target(SCRIPT, run=run), TimeBudget(1000.0), ExperimentEvents())
    found = build_budget("digits", experiment.run(experiment_design()), experiment.results)
    assert found.speedup.value == pytest.approx(20 / 12)
    assert found.not_attributed_ms.value == pytest.approx(0, abs=0.01)


def test_queues_of_loaders_get_no_more_than_some_seconds_to_settle() -> None:
    """Steps are of 12 ms here."""
    experiment = Experiment(target(SCRIPT), TimeBudget(1000.0), ExperimentEvents())
    warmups = [
        experiment._with_run_length(experiment_design(warmup_steps=steps)).plan.warmup_steps
        for steps in (3, 74, 10_000)
    ]
    assert warmups == [3, 74, 500]


def test_what_seems_to_cost_much_is_worth_its_fixes_before_it_is_named() -> None:
    """Steps of one and the same trial differ by more than half: no interval excludes 0."""
    script = dataclasses.replace(SCRIPT, noise=0.6, noise_seed=5)
    experiment = Experiment(target(script), TimeBudget(1000.0), ExperimentEvents())
    asked = experiment._with_run_length(experiment_design())
    experiment._run_round([asked.actual(), asked.baseline, *planner.required(asked)], 0)
    rows = FindingBuilder(Attribution(asked, experiment.results, 100)).multi_device_findings()
    assert not any(row.significant for row in rows)
    largest = max(rows, key=lambda row: row.lost_ms.value)
    assert largest.lost_ms.value > 2
    fixes = CAUSES_BY_ID[largest.cause].fixes(asked).values()
    assert fixes
    assert set(fixes) <= set(planner.follow_ups(asked, experiment.results))


@pytest.mark.parametrize(
    ("named", "tried"),
    [
        ([], ["epoch-boundary", "input"]),
        (["epoch-boundary"], ["input"]),
        (["epoch-boundary", "link"], []),
    ],
)
def test_a_fix_of_what_costs_much_is_tried_unless_one_of_what_is_named_can_be(
    named: list[str], tried: list[str]
) -> None:
    rows = [_costing(cause, ms) for cause, ms in (("epoch-boundary", 8), ("input", 5), ("link", 1))]
    known = [row for row in rows if row.cause in named]
    suspected = planner._suspected_findings(experiment_design(workers=4), rows, known, 20.0)
    assert [row.cause for row in suspected] == tried


def _costing(cause: str, ms: float, *, named: bool = False) -> Finding:
    return Finding(
        cause=cause,
        lost_ms=Interval(ms, 0.0, 2 * ms),
        predicted_speedup=None,
        fix="",
        evidence=(),
        significant=named,
    )


def test_a_named_cause_asks_for_its_fixes() -> None:
    experiment, _, noting = _experiment(1000.0)
    asked = experiment.run(experiment_design())
    assert asked.actual().edit(exchange="bf16") in {trial for trial, _ in noting.runs}


def test_fixes_of_what_costs_most_are_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time may be over after the first of them."""
    rows = [_costing(cause, ms, named=True) for cause, ms in (("link", 2), ("input", 9))]
    monkeypatch.setattr(FindingBuilder, "multi_device_findings", lambda _: rows[:1])
    monkeypatch.setattr(FindingBuilder, "one_device_findings", lambda _: rows[1:])
    experiment, _, _ = _experiment(1000.0)
    asked = experiment.run(experiment_design(workers=4))
    found = planner.follow_ups(asked, experiment.results)
    link, loading = (CAUSES_BY_ID[cause].fixes(asked).values() for cause in ("link", "input"))
    assert max(map(found.index, loading)) < min(map(found.index, link))


def test_a_short_time_is_for_what_is_wanted_first() -> None:
    experiment, ticking, noting = _experiment(6.0)
    experiment.run(experiment_design())
    assert ticking.now <= 6.0
    asked = [trial for trial, number in noting.runs if number == 0][3:]
    wanted = list(dict.fromkeys(planner.required(design_of_length(asked))))
    measured = [trial for trial in wanted if trial in asked]
    assert measured
    left = [trial for trial in wanted if trial not in {trial for trial, _ in noting.runs}]
    assert min(map(wanted.index, left)) > max(map(wanted.index, measured))


def design_of_length(runs: list[Trial]) -> ExperimentDesign:
    """The design at the length that was chosen."""
    steps = runs[0].plan.steps
    return dataclasses.replace(experiment_design(), plan=experiment_design().plan.edit(steps=steps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing(WorkloadRunner):
    """A target whose trials of one plan share a process tree; the first tree may fail."""

    fails: bool = False

    @classmethod
    def of(cls, runner: WorkloadRunner, *, fails: bool = False) -> Sharing:
        return cls(**vars(runner), fails=fails)

    def shared_trial(self, trial: Trial) -> Trial | None:
        return Trial(plan=trial.plan, variant=interleave.process_wide(trial.variant))

    def measure_interleaved(
        self, trials: Sequence[Trial], number: int, limit_s: float | None = None
    ) -> list[Measurement]:
        if self.fails:
            return [failed(trial, "it does not like turns") for trial in trials]
        return [self.measure(trial, number, limit_s) for trial in trials]


@pytest.mark.parametrize("fails", [False, True])
def test_trials_of_one_process_tree_are_measured_together_or_each_by_itself(fails: bool) -> None:
    experiment, _, noting = _experiment(1000.0)
    experiment.runner = Sharing.of(experiment.runner, fails=fails)
    made = experiment.run(experiment_design())
    shared = [tree for tree in noting.trees if len(tree) > 1]
    real = next(tree for tree in shared if made.actual() in tree)
    assert barrier_only(made, made.cheapest_input) in real
    assert made.baseline not in real
    assert all(
        len({interleave.process_wide(trial.variant) for trial in tree}) == 1 for tree in shared
    )
    if fails:
        by_itself = [tree for tree in noting.trees if tree == (made.actual(),)]
        assert by_itself
        assert len(shared) < len(noting.trees) / 2
    assert build_budget("digits", made, experiment.results).speedup.value == pytest.approx(20 / 12)


@pytest.mark.parametrize(
    ("slower", "seconds", "alone"), [(50, 1000.0, False), (50, 5.0, True), (1, 1.0, False)]
)
def test_without_time_for_turns_of_long_steps_the_two_ends_are_measured_by_themselves(
    slower: int, seconds: float, alone: bool
) -> None:
    """Steps are of 12 ms here, or so many times slower: two turns of 15 take 18 s and more."""
    script = Scenario(
        compute_ms_per_sample=0.1 * slower, exchange_ms=2.0 * slower, samples_per_epoch=2000
    )
    ticking, noting = Ticking(runner(script)), Noting()
    clock = TimeBudget(seconds, now=lambda: ticking.now)
    experiment = Experiment(Sharing.of(target(script, run=ticking)), clock, noting)
    made = experiment.run(experiment_design())
    first = next(tree for tree in noting.trees if made.actual() in tree)
    assert (len(first) == 1) == alone
    assert build_budget("digits", made, experiment.results).speedup.value == pytest.approx(20 / 12)


@pytest.mark.parametrize(("retries", "seconds"), [(0.0, 1000.0), (1.0, 1000.0), (1.0, 5.0)])
def test_what_a_first_look_has_seen_happen_does_not_wait_for_the_turns_of_others(
    retries: float, seconds: float
) -> None:
    """The baseline and the real run with either allocator, then what exchange and input cost."""
    experiment, _, noting = _experiment(seconds)
    experiment.runner = Sharing.of(experiment.runner)
    fed = DataLoaderProfile(batch_size=100, batches_per_epoch=20, dataset_size=2000, num_workers=8)
    seen = ScriptProfile(world_size=2, parallel="ddp", loader=fed, alloc_retries=retries)
    asked = dataclasses.replace(experiment_design(), profile=seen, scaling="weak", step_ms=12.0)
    made = experiment.run(asked)
    barrier = barrier_only(made, made.cheapest_input)
    if not retries:
        assert made.actual() in next(tree for tree in noting.trees if barrier in tree)
        return
    assert noting.trees[:2] == [(made.actual(),), (made.baseline,)]
    before = itertools.takewhile(lambda tree: barrier not in tree, noting.trees)
    known = {trial for tree in before for trial in tree}
    assert {
        with_expandable_segments(made, made.actual()),
        with_expandable_segments(made, made.baseline),
    } <= known
