"""The measurements of an experiment by trial and round, and who runs a trial."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nfold.core import interleave
from nfold.core.machine import Machine
from nfold.core.measurement import FailureCause, Measurement, MeasurementStore, cell_id
from nfold.core.plan import SAFE_PLAN, Plan
from nfold.core.script_profile import ReplayHints, ScriptProfile
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.explain.design import Trial
from nfold.explain.estimate.bootstrap import RESAMPLES, BootstrapFit
from nfold.explain.estimate.interleaved import (
    StepTimeChange,
    changing_batches,
    interleaved_metrics,
    unsteady_steps,
)
from nfold.explain.estimate.median_polish import MetricKey, TrialRun
from nfold.explain.estimate.replay import (
    Deviations,
    batch_deviations,
    mean_deviations,
    with_equal_batches,
)
from nfold.explain.metrics import (
    contended_core_fraction,
    equalize_epoch_gaps,
    ranks_with_windows,
    relative_standard_error,
)
from nfold.explain.periodic import (
    PeriodicWork,
    find_periodic_work,
    host_gap_metrics,
    periodic_metrics,
    without_affected_steps,
)
from nfold.explain.result.budget import LARGER_BUDGET_HINT, NOT_ENOUGH_TIME, lacked_time
from nfold.launch.launch_spec import RunOptions, StartCallback
from nfold.launch.script_run import PLAN_VARIABLE
from nfold.launch.verdict import HANG_TIMEOUT_HINT
from nfold.launch.workload_run import split_by_variant

# Longest over shortest cycle: 1.01 to 1.10 on steady hosts, 1.22 and 1.75 on two whose process
# trees differed by a fifth and more.
UNSTEADY_RATIO = 1.15
# Last over first cycle, or its inverse, of a step that grows or shrinks in every cycle. Of four
# cycles, one series in twelve is in order by chance, but hardly by as much.
CHANGING_RATIO = 1.3

UnstableKind = Literal["unsteady", "changing_batches"]


@dataclass
class TrialResults:
    """Measurements by trial and round.

    ``reasons`` holds why a trial has no measurement. ``stalled_s`` are the seconds without a step
    after which a run was ended as hung. ``out_of_step``: where ranks waited for each other, if they
    did; further runs would end there too.
    """

    runs: dict[Trial, dict[int, Measurement]] = field(default_factory=dict)
    reasons: dict[Trial, str] = field(default_factory=dict)
    stalled_s: dict[Trial, float] = field(default_factory=dict)
    out_of_step: str = ""

    def add(self, trial: Trial, number: int, measurement: Measurement) -> None:
        """Add the measurement of round ``number``; if it failed, the trial is not run again."""
        if measurement.status == "ok":
            self.runs.setdefault(trial, {})[number] = equalize_epoch_gaps(measurement)
            return
        self.reasons[trial] = failure_reason(measurement)
        cause = measurement.cause
        if cause is not None and cause.step and cause.stalled_s:
            self.stalled_s[trial] = cause.stalled_s

    def is_done(self, trial: Trial, number: int) -> bool:
        """Return whether the trial has a measurement of this round, or a reason."""
        return trial in self.reasons or number in self.runs.get(trial, {})

    def has(self, trials: Iterable[Trial]) -> bool:
        return all(trial in self.runs for trial in trials)

    def missing_reason(self, trials: Iterable[Trial]) -> str | None:
        """Return why the first trial without a measurement has none; None if all have one."""
        missing = next((trial for trial in trials if trial not in self.runs), None)
        return None if missing is None else self.reasons.get(missing, NOT_ENOUGH_TIME)

    def ids(self, trials: Iterable[Trial]) -> tuple[str, ...]:
        """Return the ids of the measurements of these trials."""
        found = [m.id for trial in trials for m in self.runs.get(trial, {}).values()]
        return tuple(dict.fromkeys(found))

    def ended_early(self) -> Iterator[tuple[int, str, FailureCause | None]]:
        """Yield timed steps, workload and cause of runs with fewer steps than planned.

        Runs over short epochs may have fewer on purpose, and an operation records no steps.
        """
        for one in self.measurements():
            shortened = one.variant is not None and one.variant.batches_per_epoch is not None
            timed = min((len(rank.step_ms) for rank in one.ranks), default=0)
            if not shortened and 0 < timed < (one.plan.steps or 0):
                yield timed, one.workload.name, one.cause

    def expected_seconds(self, trials: Collection[Trial]) -> float:
        """Return how long a run of these trials in one process tree takes.

        As long as an earlier run of them, or the longest with as many trials, or with the nearest
        number of trials, less the timed seconds of the surplus ones.
        """
        own = [m.wall_seconds for trial in trials for m in self.runs.get(trial, {}).values()]
        if own:
            return max(own)
        every = [*self.measurements()]
        trees = Counter(m.folder or m.id for m in every)
        sizes = [trees[m.folder or m.id] for m in every]
        nearest = min((abs(size - len(trials)) for size in sizes), default=0)
        found = []
        for size, one in zip(sizes, every, strict=True):
            if abs(size - len(trials)) == nearest:
                timed_s = sum(w.seconds for rank in one.ranks[:1] for w in rank.windows)
                found.append(one.wall_seconds - max(0, size - len(trials)) * timed_s)
        return max(found, default=0.0)

    def fit(self, resamples: int = RESAMPLES, *, final: bool = True) -> BootstrapFit:
        """Fit the metrics of all trials; ``final`` if nothing more will be measured."""
        table: dict[MetricKey, dict[int, float]] = {}
        tree_names: dict[TrialRun, str] = {}
        within_errors: dict[TrialRun, float] = {}
        standard_errors: list[tuple[Trial, float]] = []
        deviations: dict[tuple[Plan, str], list[Deviations]] = {}
        trees = [(*tree, find_periodic_work(tree[2])) for tree in self._process_trees()]
        all_periodic = [work for *_, periodic in trees for work in periodic.values()]
        for folder, number, members, periodic in trees:
            usual = _without_periodic_steps(members, periodic)
            for trial, one in usual.items():
                synchronize = trial.ranks_synchronize
                if trial.variant.input != "real":
                    own = batch_deviations(one, ranks_synchronize=synchronize)
                    for name, each in own.items():
                        deviations.setdefault((trial.plan, name), []).append(each)
                usual[trial] = with_equal_batches(one, ranks_synchronize=synchronize)
            if len(members) > 1:
                found, errors = interleaved_metrics(usual)
                within_errors |= {(trial, number): error for trial, error in errors.items()}
                tree_names |= {(trial, number): folder for trial in members}
            else:
                found = {one: one.metrics(m) for one, m in usual.items()}
            for trial, metrics in found.items():
                work = periodic.get(trial)
                metrics |= periodic_metrics(work, all_periodic)
                metrics |= host_gap_metrics(members[trial], work)
                for name, value in metrics.items():
                    table.setdefault((trial, name), {})[number] = value
            standard_errors += [
                (trial, max(relative_standard_error(m), contended_core_fraction(m)))
                for trial, m in usual.items()
            ]
        return BootstrapFit(
            table,
            standard_errors,
            resamples,
            tree_names,
            within_errors,
            {key: mean_deviations(each) for key, each in deviations.items()},
            final=final,
            host_ahead=[trial for trial in self.runs if _host_is_ahead(trial, table)],
            failed_trials=[
                trial
                for trial, reason in self.reasons.items()
                if trial not in self.runs and not lacked_time(reason)
            ],
        )

    def unstable_steps(self) -> dict[UnstableKind, StepTimeChange]:
        """Return the largest changes of a step between cycles of a process tree, if they are large.

        ``unsteady``: of a step that repeats the same work. ``changing_batches``: of the real run,
        beyond the changes of replayed batches.
        """
        trees = [
            _without_periodic_steps(members, find_periodic_work(members))
            for _, _, members in self._process_trees()
            if len(members) > 1
        ]
        every: dict[UnstableKind, tuple[Iterable[StepTimeChange | None], float]] = {
            "unsteady": (map(unsteady_steps, trees), UNSTEADY_RATIO),
            "changing_batches": (map(changing_batches, trees), CHANGING_RATIO),
        }
        found: dict[UnstableKind, StepTimeChange] = {}
        for kind, (changes, least) in every.items():
            most = max(filter(None, changes), key=lambda change: change.magnitude, default=None)
            if most is not None and most.magnitude > least:
                found[kind] = most
        return found

    def _process_trees(self) -> Iterator[tuple[str, int, dict[Trial, Measurement]]]:
        found: dict[tuple[str, int], dict[Trial, Measurement]] = {}
        for trial, runs in self.runs.items():
            for number, measurement in runs.items():
                tree = (measurement.folder or measurement.id, number)
                found.setdefault(tree, {})[trial] = measurement
        return ((folder, number, members) for (folder, number), members in found.items())

    def measurements(self) -> Iterator[Measurement]:
        for runs in self.runs.values():
            yield from runs.values()


def _without_periodic_steps(
    members: Mapping[Trial, Measurement], periodic: Mapping[Trial, PeriodicWork]
) -> dict[Trial, Measurement]:
    return {trial: without_affected_steps(m, periodic.get(trial)) for trial, m in members.items()}


def failure_reason(failed: Measurement) -> str:
    """Return status, cause and next step of a failed measurement."""
    hint = LARGER_BUDGET_HINT if hit_time_limit(failed) else ""
    hint = f"; {HANG_TIMEOUT_HINT}" if failed.status == "hung" else hint
    return f"{failed.status}: {failure_text(failed)}{hint}"


def failure_text(failed: Measurement) -> str:
    return failed.cause.text if failed.cause else "no error message"


def hit_time_limit(measurement: Measurement) -> bool:
    """Return whether the time limit ended the run, and not a signal from the user."""
    stopped = measurement.cause is not None and measurement.cause.signal is not None
    return measurement.status == "interrupted" and not stopped


def _host_is_ahead(trial: Trial, table: Mapping[MetricKey, Mapping[int, float]]) -> bool:
    steps, ahead = table.get((trial, "step"), {}), table.get((trial, "ahead"), {})
    return all(ahead.get(number, 0.0) >= step_ms for number, step_ms in steps.items())


# Why a framework cannot run a plan under a variant, or None.
RefusalRule = Callable[[Workload, Plan, Variant], str | None]
# The fields of a Variant that a framework can change between two steps of a process.
SwitchableFields = Callable[[Workload, Plan], tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class WorkloadRunner:
    """Runs the trials of a workload or a script, and stores their measurements.

    ``kept_variant`` and ``kept_fields`` are remedies under which all trials run: interventions, and
    fields of the plan where a trial leaves them open.
    """

    workload: Workload
    machine: Machine
    options: RunOptions
    store: MeasurementStore
    run: Callable[..., Measurement]  # nfold.launch.workload_run.run
    refusal_rule: RefusalRule
    switchable_fields: SwitchableFields
    training_samples: int | None = None
    ignore_stored: bool = False
    kept_variant: Variant = field(default_factory=Variant)
    kept_fields: Mapping[str, object] = field(default_factory=dict)

    def with_remedies(self, fields: Mapping[str, object], interventions: Variant) -> WorkloadRunner:
        """Return a runner of trials under these fields of the plan and interventions."""
        return dataclasses.replace(self, kept_fields=fields, kept_variant=interventions)

    def with_sources(self, sources: tuple[tuple[str, str], ...]) -> WorkloadRunner:
        """Return a runner that runs edited copies of a script's files: (path, path of the copy)."""
        options = dataclasses.replace(self.options, edited_sources=sources)
        return dataclasses.replace(self, options=options)

    def with_converted(self, sources: tuple[tuple[str, str], ...]) -> WorkloadRunner:
        """Return a runner of copies with nfold.Run, which divides the batch itself.

        Nothing is chosen by a search while they are timed.
        """
        options = dataclasses.replace(
            self.options,
            edited_sources=sources,
            replay_hints=ReplayHints(script_sets_batch_size=True),
            environment={PLAN_VARIABLE: json.dumps({SAFE_PLAN: True})},
        )
        return dataclasses.replace(self, options=options)

    def _effective(self, trial: Trial) -> Trial:
        plan = trial.plan
        still_open = {n: v for n, v in self.kept_fields.items() if getattr(plan, n) is None}
        return Trial(plan=plan.edit(**still_open), variant=self.kept_variant.merge(trial.variant))

    def with_profile(self, profile: ScriptProfile) -> WorkloadRunner:
        """Return a runner that passes the profile of a script to its runs."""
        options = dataclasses.replace(
            self.options, replay_hints=profile.replay_hints, libraries=profile.loaded_libraries
        )
        return dataclasses.replace(self, options=options)

    def refusal_reason(self, trial: Trial) -> str | None:
        """Return why the trial cannot run, or None."""
        trial = self._effective(trial)
        return self.refusal_rule(self.workload, trial.plan, trial.variant)

    def stored(self, trial: Trial, number: int) -> Measurement | None:
        """Return the measurement of an earlier explanation in this round, or None."""
        trial = self._effective(trial)
        cell = cell_id(self.workload, trial.plan, trial.variant, self.machine)
        found = None if self.ignore_stored else self.store.find(cell, number)
        return found if found is not None and found.is_final else None

    def measure(self, trial: Trial, number: int, limit_s: float | None = None) -> Measurement:
        """Run the trial in a fresh process tree for at most ``limit_s`` seconds and store it."""
        measurement = self._run(self._effective(trial), number, limit_s)
        self.store.append(measurement)
        return measurement

    def measure_alternating(
        self, trial: Trial, number: int, limit_s: float, on_start: StartCallback
    ) -> Measurement:
        """Run the trial in a fresh process tree that alternates with another one.

        The measurement is not stored: both run in threads, and a store belongs to one.
        """
        alternating = dataclasses.replace(self.options, alternates=True, on_start=on_start)
        runner = dataclasses.replace(self, options=alternating)
        return runner._run(self._effective(trial), number, limit_s)

    def shared_trial(self, trial: Trial) -> Trial | None:
        """Return the key of the process trees that can run the trial; None: only its own."""
        trial = self._effective(trial)
        switched = self.switchable_fields(self.workload, trial.plan)
        if not switched or trial.plan.epochs is not None or trial.plan.batch is None:
            return None
        return Trial(plan=trial.plan, variant=interleave.process_wide(trial.variant, switched))

    def measure_interleaved(
        self, trials: Sequence[Trial], number: int, limit_s: float | None = None
    ) -> list[Measurement]:
        """Run trials with equal ``shared_trial`` in one fresh process tree and store them."""
        variants = tuple(self._effective(trial).variant for trial in trials)
        shared = self.shared_trial(trials[0])
        assert shared is not None
        whole = self._run(shared, number, limit_s, variants)
        found = split_by_variant(whole, variants)
        if whole.status == "ok":
            # A trial that had no slot before the script ended is not stored.
            for measurement in filter(ranks_with_windows, found):
                self.store.append(measurement)
        return found

    def _run(
        self, trial: Trial, number: int, limit_s: float | None, variants: tuple[Variant, ...] = ()
    ) -> Measurement:
        return self.run(
            self.workload,
            trial.plan,
            trial.variant or None,
            machine=self.machine,
            options=dataclasses.replace(self.options, time_limit_s=limit_s),
            repeat=number,
            interleaved_variants=variants,
        )

    def epoch_steps(self, plan: Plan) -> int | None:
        """Return the steps per epoch, None if unknown before a run."""
        return None if not self.training_samples else -(-self.training_samples // (plan.batch or 1))
