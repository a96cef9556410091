"""The experiment: which trials run, in which order, and how often, until the time budget ends.

Causes that the probe run observed come first. On one device, the fixes of a cause that takes more
than half of its step follow at once. Then rounds measure all trials, each round in a random order,
so that drift affects all trials alike. What the first round finds calls for further trials (fixes,
pairs of causes removed together, other batch sizes), which come first in the next round. From the
third repeat on, a round repeats only the trials of the widest interval. On an unsteady host, the
second round begins with another process tree of the real run.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from nfold.core.errors import RunFailure
from nfold.core.measurement import Measurement
from nfold.core.plan import LONG_STEP_S
from nfold.explain import planner
from nfold.explain.advice.caveats import find_training_errors
from nfold.explain.advice.pytorch import with_gap_locations
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.metrics import gpu_clock_rates
from nfold.explain.result.budget import NOT_ENOUGH_TIME
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import TrialResults, WorkloadRunner, failure_reason
from nfold.launch.launch_spec import StopRequest
from nfold.launch.training_checks import OUT_OF_STEP

PILOT_STEPS = 30
MAX_ROUNDS = 6
MIN_TREES = 4  # process trees of a useful explanation
OVERRUN_FACTOR = 1.2  # a trial that was never measured may exceed the remaining time by so much
SLOWER_FACTOR = 2.0  # by which a tree may exceed what the probe run made expect


class ExperimentEvents:
    """Callbacks of an experiment. The base class ignores all events."""

    def planned(self, design: ExperimentDesign, results: TrialResults) -> None:
        """The design is complete; ``results`` will hold its trials."""

    def started(self, trials: Sequence[Trial], number: int, remaining_s: float) -> None:
        """A run of ``trials`` in one process tree starts, in round ``number``."""

    def updated(self, remaining_s: float) -> None:
        """The results of a measured trial were added."""

    def finished(
        self, trials: Sequence[Trial], number: int, found: Sequence[Measurement], remaining_s: float
    ) -> None:
        """``trials`` ran, well or not, or earlier measurements of them were found."""


@dataclass
class Experiment:
    """The trials of one explanation while they run."""

    runner: WorkloadRunner
    time_budget: TimeBudget
    events: ExperimentEvents
    stop: StopRequest = field(default_factory=StopRequest)
    results: TrialResults = field(default_factory=TrialResults)
    max_rounds: int = MAX_ROUNDS
    _not_interleaved: set[Trial] = field(default_factory=set)
    _retried: set[Trial] = field(default_factory=set)
    _interleaved_failures: dict[Trial, str] = field(default_factory=dict)
    _finds_unused_parameters: bool = False
    _calls_collectives: bool = False
    _step_s: float = 0.0

    def run(self, design: ExperimentDesign) -> ExperimentDesign:
        """Measure the trials of ``design``.

        Returns the design with run lengths, the code in host gaps and the clock rates of the
        devices. Raises RunFailure if the baseline or the real run fails.
        """
        if design.profile is not None:
            self.runner = self.runner.with_profile(design.profile)
        design = self._with_run_length(design)
        self.events.planned(design, self.results)
        results = self.results
        self._finds_unused_parameters = design.facts.find_unused_parameters
        self._calls_collectives = design.facts.most_frequent("collective") is not None
        required, observed = list(planner.required(design)), list(planner.observed_in_probe(design))
        self._check_budget(design)
        # A cause that the probe run observed does not wait for the slots of all other trials.
        self._run_required(design, (design.actual(), design.baseline), observed or required)
        fixes = planner.dominant_fixes(design, results)
        self._run_round(self._affordable(fixes), 0, fixes)
        epochs = planner.epoch_boundary_trials(
            design, results, self.runner.epoch_steps, self.time_budget.budget_s
        )
        # Whether every epoch has the same order shows in the second one.
        order = epochs[:1] if design.facts.training_loader.epoch_unset else []
        urgent = [*order, *observed, *planner.batch_size_trials(design)]
        first_round = [*urgent, *required, *epochs]
        original_batch = functools.partial(
            planner.with_original_batch, design, results, self._interleaved_failures
        )
        self._run_round(self._affordable(first_round), 0, urgent, until=original_batch)
        other_design = original_batch()
        if other_design is not None:
            self.results = TrialResults()
            return self.run(other_design)
        self._run_round(first_round, 0)
        for number in range(1, self.max_rounds):
            follow_ups = planner.follow_ups(design, results)
            trials = self._next_trials(design, [*first_round, *follow_ups], number)
            tried = {**results.runs, **results.reasons}
            new = [one for one in dict.fromkeys([*follow_ups, *trials]) if one not in tried]
            if number == 1 and "unsteady" in results.unstable_steps():
                new = [design.actual(), *new]
            if self.stop or not self._run_round([*new, *trials], number, new):
                break
        return dataclasses.replace(
            with_gap_locations(design, results.measurements()),
            clock_rates=gpu_clock_rates(results.measurements(), design.devices),
        )

    def run_probe(self, trial: Trial, *, force: bool = False) -> Measurement:
        """Run a probe whatever time is left; it may fail. ``force`` ignores stored measurements."""
        found = None if force else self.runner.stored(trial, 0)
        if found is None:
            self.events.started([trial], 0, self.time_budget.remaining_s)
            found = self.runner.measure(trial, 0, self.time_budget.probe_limit_s)
        self.events.finished([trial], 0, [found], self.time_budget.remaining_s)
        return found

    def _with_run_length(self, design: ExperimentDesign) -> ExperimentDesign:
        step_s = self._step_s = (design.step_ms or self._pilot_step_ms(design)) / 1e3
        single = Trial(plan=design.plan.edit(steps=1, epochs=None))
        interleaved = self.runner.shared_trial(single) is not None
        return planner.with_run_length(design, step_s, interleaved=interleaved)

    def _check_budget(self, design: ExperimentDesign) -> None:
        """Raise RunFailure if a script starts and steps too slowly for the time budget."""
        required = (design.actual(), design.baseline)
        missing = [trial for trial in required if self.runner.stored(trial, 0) is None]
        tree_s = self._tree_seconds(design)
        needed_s = tree_s * len(missing)
        if design.start_s is None or needed_s <= self.time_budget.required_s:
            return
        option = self.time_budget.sufficient_option(MIN_TREES * tree_s)
        raise RunFailure(
            f"{_training_error(design)}{self.runner.workload} takes {design.start_s:.0f} s to "
            f"start and {self._step_s:.2g} s per step: its trials need {needed_s:.0f} s, "
            f"{self.time_budget.remaining_s:.0f} s are left; next: {option}"
        )

    def _pilot_step_ms(self, design: ExperimentDesign) -> float:
        pilot = Trial(plan=design.plan.edit(steps=PILOT_STEPS, epochs=None))
        self._run_required(design, [pilot])
        (found,) = self.results.runs.pop(pilot).values()
        return pilot.metrics(found)["step"]

    def _run_round(
        self,
        trials: Iterable[Trial],
        number: int,
        first: Collection[Trial] = (),
        until: Callable[[], object] = lambda: None,
    ) -> bool:
        """Run every trial once, until ``until`` returns true; return whether any was measured.

        The process trees of ``first`` come first, in this order, because the time budget may end.
        The others follow in random order.
        """
        groups = self._interleaved_groups(trials)
        random.Random(number).shuffle(groups)
        pending = [one for one in dict.fromkeys(first) if not self.results.is_done(one, number)]
        rank = {trial: place for place, trial in enumerate(pending)}
        groups.sort(key=lambda group: min(rank.get(trial, len(rank)) for trial in group))
        measured = [self._run_group(group, number) for group in groups if not until()]
        return any(measured)

    def _interleaved_groups(self, trials: Iterable[Trial]) -> list[list[Trial]]:
        """Group trials by process tree, in the order of the first trial of each tree.

        A wrapper that finds unused parameters exchanges them in every backward: a trial without
        gradient exchange needs a process tree of its own.
        """
        found: dict[object, list[Trial]] = {}
        for trial in dict.fromkeys(trials):
            own_tree = trial in self._not_interleaved or (
                self._finds_unused_parameters and trial.variant.exchange == "none"
            )
            shared = None if own_tree else self.runner.shared_trial(trial)
            found.setdefault((shared is None, shared or trial), []).append(trial)
        return list(found.values())

    def _affordable(self, trials: Iterable[Trial]) -> list[Trial]:
        left_s, fitting = self.time_budget.remaining_s, []
        for group in self._interleaved_groups(t for t in trials if not self.results.is_done(t, 0)):
            known = all(self.runner.stored(trial, 0) for trial in group)
            left_s -= 0.0 if known else self.results.expected_seconds(group)
            if left_s >= 0:
                fitting += group
        return fitting

    def _run_required(
        self, design: ExperimentDesign, required: Sequence[Trial], optional: Sequence[Trial] = ()
    ) -> None:
        """Run the trials that an explanation needs; they may exceed the time budget.

        ``optional`` trials that share their process trees run with them, unless steps are so long
        that the time budget does not allow it. A tree whose steps are far slower than those of the
        probe run leaves the time of the others. A trial that fails is retried once, because a
        script that passed its probe run may fail by chance.
        """
        for trial in required:
            while trial not in self.results.runs:
                if trial in self.results.reasons:
                    reason = self.results.reasons.pop(trial)
                    if self.results.out_of_step:
                        found = {OUT_OF_STEP: self.results.out_of_step}
                        (error,) = find_training_errors(found, None, design.facts)
                        raise RunFailure(f"wrong training: {error}")
                    # A hang takes its whole time limit each time.
                    final = reason.startswith(("hung", "interrupted"))
                    if self.stop or trial in self._retried or final:
                        error = _training_error(design)
                        raise RunFailure(
                            f"{error}{trial}: {reason}; there is nothing to compare with"
                        )
                    self._retried.add(trial)
                (group, *_) = self._interleaved_groups([trial, *optional])
                missing = [one for one in group if self._needs_run(one, 0)]
                if trial in missing:
                    seconds = self._tree_seconds(design, missing)
                    if self._step_s > LONG_STEP_S and seconds > self.time_budget.remaining_s:
                        missing = [trial]
                    trees = sum(one not in self.results.runs for one in required)
                    limit_s = self._required_limit_s(design, missing, trees)
                    if limit_s <= 0:
                        self.results.reasons[trial] = f"interrupted: {NOT_ENOUGH_TIME}"
                        continue
                    self._measure(missing, 0, limit_s)

    def _required_limit_s(
        self, design: ExperimentDesign, trials: Sequence[Trial], trees: int
    ) -> float:
        """Return the time limit of the next of ``trees`` process trees that must run.

        What an interleaved run has measured by then suffices.
        """
        share_s = self.time_budget.required_s / trees
        if design.start_s is None:
            return share_s
        expected_s = self._tree_seconds(design, trials)
        return min(share_s, max(self.time_budget.remaining_s / trees, SLOWER_FACTOR * expected_s))

    def _tree_seconds(self, design: ExperimentDesign, trials: Sequence[Trial] = ()) -> float:
        """Return the expected seconds of a process tree: one trial, or several interleaved ones."""
        if len(trials) > 1:
            steps_s = planner.interleaved_seconds(design, trials, self._step_s)
        else:
            steps_s = planner.run_seconds(design, self._step_s)
        return (design.start_s or 0.0) + steps_s

    def _run_group(self, group: Sequence[Trial], number: int) -> bool:
        """Run the trials of one process tree, if time allows; return whether any is measured.

        The limit is the remaining time plus the expected duration, because the work of a script
        between its epochs may take any time.
        """
        missing = [trial for trial in group if self._needs_run(trial, number)]
        seconds, new = self.results.expected_seconds(missing), not self.results.has(missing[:1])
        remaining_s = (OVERRUN_FACTOR if new else 1) * self.time_budget.remaining_s
        ended = self.stop or self.results.out_of_step
        if missing and not ended and seconds <= remaining_s:
            self._measure(missing, number, self.time_budget.remaining_s + seconds)
        return any(number in self.results.runs.get(trial, {}) for trial in group)

    def _needs_run(self, trial: Trial, number: int) -> bool:
        if self.results.is_done(trial, number):
            return False
        reason = self.runner.refusal_reason(trial)
        if reason is not None:
            self.results.reasons[trial] = reason
            return False
        retry = number == 0 and trial in self._retried
        found = None if retry else self.runner.stored(trial, number)
        if found is not None:
            self._record([trial], number, [found])
        return found is None

    def _measure(self, trials: Sequence[Trial], number: int, limit_s: float | None = None) -> None:
        self.events.started(trials, number, self.time_budget.remaining_s)
        if len(trials) > 1:
            found = self.runner.measure_interleaved(trials, number, limit_s)
        else:
            found = [self.runner.measure(trial, number, limit_s) for trial in trials]
        self._record(trials, number, found)
        self.events.updated(self.time_budget.remaining_s)

    def _record(self, trials: Sequence[Trial], number: int, found: list[Measurement]) -> None:
        """Add measurements to the results.

        A trial without a window when an interleaved run ended is not added: it runs again by itself.
        If no trial had one, ``_interleaved_failures`` gets the reason of the first. If a script calls
        collectives and a trial replaced them, its ranks may have stopped by local values: being out of
        step is no error of the script then.
        """
        intact = not self._calls_collectives or all(t.keeps_collectives for t in trials)
        self.events.finished(trials, number, found, self.time_budget.remaining_s)
        for trial, measurement in zip(trials, found, strict=True):
            ok = measurement.status == "ok"
            measured = ok and bool(trial.metrics(measurement))
            cause = (
                measurement.cause if measurement.cause and measurement.cause.out_of_step else None
            )
            if cause is not None and intact:
                self.results.out_of_step = self.results.out_of_step or cause.text
            would_recur = cause is not None and not trial.keeps_collectives
            retry = not (self.results.out_of_step or would_recur) and (ok or not self.stop)
            if len(trials) > 1 and not measured and retry:
                self._not_interleaved.add(trial)
            else:
                self.results.add(trial, number, measurement)
        failed = found[0].status in ("crashed", "unsupported")
        if self._not_interleaved.issuperset(trials) and failed:
            self._interleaved_failures[trials[0]] = failure_reason(found[0])

    def _next_trials(
        self, design: ExperimentDesign, trials: list[Trial], number: int
    ) -> list[Trial]:
        """Return all trials in the second and third round, then those of the widest interval.

        All trials of their process trees go with them: the difference between two trees cancels
        only among trials that ran in both.
        """
        if number < 3:
            return trials
        widest = planner.widest_interval(design, self.results)
        shared = {self.runner.shared_trial(trial) for trial in widest} - {None}
        return [*widest, *(one for one in trials if self.runner.shared_trial(one) in shared)]


def _training_error(design: ExperimentDesign) -> str:
    """Return what is wrong with the training by the probe run, to begin a message; or nothing."""
    found = {caveat.kind: caveat.text for caveat in design.probe_caveats}
    errors = find_training_errors(found, None, design.facts)
    return f"wrong training: {errors[0]}; " if errors else ""
