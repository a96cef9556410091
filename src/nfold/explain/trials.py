"""What has been measured so far: every rung with its runs, and why others have none."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from nfold.core import interleave
from nfold.core.machine import Machine
from nfold.core.measurement import Caveat, FailureCause, Measurement, MeasurementStore, cell_id
from nfold.core.plan import Plan
from nfold.core.script_profile import ScriptProfile
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
from nfold.explain.metrics import (
    compute_metrics,
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
from nfold.explain.result.budget import NOT_ENOUGH_TIME
from nfold.launch.launch_spec import RunOptions
from nfold.launch.verdict import HANG_TIMEOUT_HINT
from nfold.launch.workload_run import split_by_variant

LARGER_BUDGET_HINT = "; next: a larger --budget"
UNSTEADY_RATIO = 1.15
"""The longest turn over the shortest. On steady hosts it is 1.01 to 1.10, on two where process
trees of one kind differed by a fifth and more 1.22 and 1.75.
"""
CHANGING_RATIO = 1.3
"""The last turn over the first, or the first over the last, of steps that grow or shrink in each:
of four turns one in twelve does so by chance, hardly by as much.
"""


UnstableKind = Literal["unsteady", "changing_batches"]
"""Kinds of doubts."""


@dataclass
class TrialResults:
    """Runs by rung and round; ``reasons`` of rungs that cannot be run, or could not.

    ``stalled_s`` are seconds without a step after one, in runs that were ended then.
    """

    runs: dict[Trial, dict[int, Measurement]] = field(default_factory=dict)
    reasons: dict[Trial, str] = field(default_factory=dict)
    stalled_s: dict[Trial, float] = field(default_factory=dict)

    def add(self, trial: Trial, number: int, measurement: Measurement) -> None:
        """Keep a run, passes as long for all; one that failed is the reason why its rung is not
        asked again.
        """
        if measurement.status == "ok":
            self.runs.setdefault(trial, {})[number] = equalize_epoch_gaps(measurement)
            return
        self.reasons[trial] = failure_reason(measurement)
        cause = measurement.cause
        if cause is not None and cause.step and cause.stalled_s:
            self.stalled_s[trial] = cause.stalled_s

    def count_rounds(self, trial: Trial) -> int:
        """How often a rung was run."""
        return len(self.runs.get(trial, {}))

    def was_tried(self, trial: Trial) -> bool:
        """Whether it has a run, or a reason why not."""
        return trial in self.runs or trial in self.reasons

    def is_done(self, trial: Trial, number: int) -> bool:
        """Whether it has a run in this round, or a reason why it has none in any."""
        return trial in self.reasons or number in self.runs.get(trial, {})

    def has(self, trials: Iterable[Trial]) -> bool:
        """Whether every one of these was run."""
        return all(rung in self.runs for rung in trials)

    def missing_reason(self, trials: Iterable[Trial]) -> str | None:
        """Why the first of these that has no run has none; None where all have."""
        for rung in trials:
            if rung not in self.runs:
                return self.reasons.get(rung, NOT_ENOUGH_TIME)
        return None

    def ids(self, trials: Iterable[Trial]) -> tuple[str, ...]:
        """The runs of these rungs."""
        found = [m.id for rung in trials for m in self.runs.get(rung, {}).values()]
        return tuple(dict.fromkeys(found))

    def caveats(self) -> tuple[Caveat, ...]:
        """The first doubt of every kind."""
        found = [doubt for m in self.measurements() for doubt in m.warnings]
        return tuple({doubt.kind: doubt for doubt in reversed(found)}.values())

    def ended_early(self) -> Iterator[tuple[int, str, FailureCause | None]]:
        """Timed steps of runs that have fewer than they should, what was run, and what ended it.

        Passes that nfold cut short may be fewer on purpose, and an operation notes no steps.
        """
        for one in self.measurements():
            cut = one.variant is not None and one.variant.batches_per_epoch is not None
            timed = min((len(rank.step_ms) for rank in one.ranks), default=0)
            if not cut and 0 < timed < (one.plan.steps or 0):
                yield timed, one.workload.name, one.cause

    def expected_seconds(self, trials: Collection[Trial]) -> float:
        """How long a run of these that share it takes: as one of them did, or one of as many.

        Where none was of so few, the longest of the next more, less what it timed of the others.
        """
        own = [m.wall_seconds for rung in trials for m in self.runs.get(rung, {}).values()]
        if own:
            return max(own)
        sizes = Counter(m.folder or m.id for m in self.measurements())
        walls = [
            (sizes[m.folder or m.id], m.wall_seconds, _timed_seconds(m))
            for m in self.measurements()
        ]
        nearest = min((abs(size - len(trials)) for size, _, _ in walls), default=0)
        found = [
            wall - max(0, size - len(trials)) * timed
            for size, wall, timed in walls
            if abs(size - len(trials)) == nearest
        ]
        return max(found, default=0.0)

    def fit(self, resamples: int = RESAMPLES, *, final: bool = True) -> BootstrapFit:
        """The values of all readings; ``final`` where nothing more will be measured."""
        table: dict[MetricKey, dict[int, float]] = {}
        shared: dict[TrialRun, str] = {}
        inside: dict[TrialRun, float] = {}
        scatters: list[tuple[Trial, float]] = []
        trees = [*self._process_trees()]
        apart = [find_periodic_work(members) for _, _, members in trees]
        every = [one for of_tree in apart for one in of_tree.values()]
        for (folder, number, members), of_tree in zip(trees, apart, strict=True):
            usual = _without_periodic_steps(members, of_tree)
            if len(members) > 1:
                found, errors = interleaved_metrics(usual)
                inside |= {(rung, number): error for rung, error in errors.items()}
                shared |= {(rung, number): folder for rung in members}
            else:
                found = {
                    r: compute_metrics(m, ranks_synchronize=r.ranks_synchronize)
                    for r, m in usual.items()
                }
            for rung, named in found.items():
                recurs = of_tree.get(rung)
                more = {
                    **periodic_metrics(recurs, every),
                    **host_gap_metrics(members[rung], recurs),
                }
                for name, value in {**named, **more}.items():
                    table.setdefault((rung, name), {})[number] = value
            scatters += [
                (rung, max(relative_standard_error(m), contended_core_fraction(m)))
                for rung, m in usual.items()
            ]
        ahead = [rung for rung in self.runs if _host_is_ahead(rung, table)]
        failed = [rung for rung in self.reasons if rung not in self.runs]
        return BootstrapFit(
            table,
            scatters,
            resamples,
            shared,
            inside,
            final=final,
            host_ahead=ahead,
            failed_trials=failed,
        )

    def unstable_steps(self) -> dict[UnstableKind, StepTimeChange]:
        """What a step varied by most in its turns, where that is much.

        ``unsteady``: though nothing differed; ``changing_batches``: from what to what those of the
        real run went by their batches.
        """
        trees = [members for _, _, members in self._process_trees() if len(members) > 1]
        in_turns = [
            _without_periodic_steps(members, find_periodic_work(members)) for members in trees
        ]
        found: dict[UnstableKind, StepTimeChange | None] = {
            "unsteady": _largest_change(map(unsteady_steps, in_turns), UNSTEADY_RATIO),
            "changing_batches": _largest_change(map(changing_batches, in_turns), CHANGING_RATIO),
        }
        return {kind: most for kind, most in found.items() if most is not None}

    def _process_trees(self) -> Iterator[tuple[str, int, dict[Trial, Measurement]]]:
        found: dict[tuple[str, int], dict[Trial, Measurement]] = {}
        for rung, runs in self.runs.items():
            for number, measurement in runs.items():
                tree = (measurement.folder or measurement.id, number)
                found.setdefault(tree, {})[rung] = measurement
        return ((folder, number, members) for (folder, number), members in found.items())

    def measurements(self) -> Iterator[Measurement]:
        """All runs."""
        for runs in self.runs.values():
            yield from runs.values()


def _without_periodic_steps(
    members: Mapping[Trial, Measurement], recurs: Mapping[Trial, PeriodicWork]
) -> dict[Trial, Measurement]:
    return {rung: without_affected_steps(one, recurs.get(rung)) for rung, one in members.items()}


def _largest_change(found: Iterable[StepTimeChange | None], least: float) -> StepTimeChange | None:
    most = max(filter(None, found), key=lambda one: one.magnitude, default=None)
    return most if most is not None and most.magnitude > least else None


def failure_reason(failed: Measurement) -> str:
    """Why a run has no result, by its status, and what to do about it."""
    return f"{failed.status}: {failure_text(failed)}{_failure_hint(failed)}"


def _failure_hint(measurement: Measurement) -> str:
    if measurement.status == "hung":
        return f"; {HANG_TIMEOUT_HINT}"
    return LARGER_BUDGET_HINT if hit_time_limit(measurement) else ""


def failure_text(failed: Measurement) -> str:
    """Why a run has no result, in its own words."""
    return failed.cause.text if failed.cause else "it ended without a word"


def hit_time_limit(measurement: Measurement) -> bool:
    """Whether nfold ended it for that, and not a person."""
    stopped = measurement.cause is not None and measurement.cause.signal is not None
    return measurement.status == "interrupted" and not stopped


def _host_is_ahead(trial: Trial, table: Mapping[MetricKey, Mapping[int, float]]) -> bool:
    steps, ahead = table.get((trial, "step"), {}), table.get((trial, "ahead"), {})
    return all(ahead.get(number, 0.0) >= step_ms for number, step_ms in steps.items())


def _timed_seconds(measurement: Measurement) -> float:
    return sum(window.seconds for rank in measurement.ranks[:1] for window in rank.windows)


RefusalRule = Callable[[Workload, Plan, Variant], str | None]
"""Why a plan or its ablation cannot be run, or None: what the plan's framework says."""
SwitchableFields = Callable[[Workload, Plan], tuple[str, ...]]
"""The fields of an Ablation that can change between two steps: what the plan's framework says."""


class RunFunction(Protocol):
    """The one verb, ``nfold.launch.workload_run.run``."""

    def __call__(
        self,
        workload: Workload,
        plan: Plan,
        variant: Variant | None = None,
        *,
        machine: Machine,
        options: RunOptions,
        repeat: int,
        interleaved_variants: tuple[Variant, ...] = (),
    ) -> Measurement:
        """Run one complete plan under an ablation; a failure is a measurement too."""


class TrialRunner(Protocol):
    """Something that can be explained: a workload, or a script."""

    @property
    def target_name(self) -> str:
        """As a person wrote it."""

    @property
    def results_folder(self) -> Path:
        """The folder that measurements are relative to."""

    def with_profile(self, profile: ScriptProfile) -> TrialRunner:
        """The same, whose runs are told what they need to know of a script."""

    def refusal_reason(self, trial: Trial) -> str | None:
        """Why the rung cannot be run, without running it, or None."""

    def stored(self, trial: Trial, number: int) -> Measurement | None:
        """What an earlier explanation measured of this rung in this round, or None."""

    def measure(self, trial: Trial, number: int, limit_s: float | None = None) -> Measurement:
        """Run the rung in a fresh process tree, for ``limit_s`` seconds at most; what happened is
        kept when this returns.
        """

    def shared_trial(self, trial: Trial) -> Trial | None:
        """What can be run in one process tree has the same here; None: it is run by itself."""

    def measure_interleaved(
        self, trials: Sequence[Trial], number: int, limit_s: float | None = None
    ) -> list[Measurement]:
        """Run these, which can be run together, in one fresh process tree, as ``measure`` does."""

    def epoch_steps(self, plan: Plan) -> int | None:
        """Steps of an epoch, None where nobody knows before it was run."""


@dataclass(frozen=True, kw_only=True)
class WorkloadRunner:
    """A workload, built-in or by reference, whose measurements are in a store."""

    workload: Workload
    machine: Machine
    options: RunOptions
    store: MeasurementStore
    run: RunFunction
    refusal_rule: RefusalRule
    switchable_fields: SwitchableFields
    training_samples: int | None = None
    ignore_stored: bool = False

    @property
    def target_name(self) -> str:
        """As it was written."""
        return str(self.workload)

    @property
    def results_folder(self) -> Path:
        return self.options.results

    def with_profile(self, profile: ScriptProfile) -> WorkloadRunner:
        """Told what a first look showed."""
        options = dataclasses.replace(self.options, replay_hints=profile.replay_hints)
        return dataclasses.replace(self, options=options)

    def refusal_reason(self, trial: Trial) -> str | None:
        """What the framework says."""
        return self.refusal_rule(self.workload, trial.plan, trial.variant)

    def stored(self, trial: Trial, number: int) -> Measurement | None:
        """The stored result, unless it was cut short or all is to be measured anew."""
        cell = cell_id(self.workload, trial.plan, trial.variant, self.machine)
        found = None if self.ignore_stored else self.store.find(cell, number)
        return found if found is not None and found.is_final else None

    def measure(self, trial: Trial, number: int, limit_s: float | None = None) -> Measurement:
        """Run, and keep it."""
        measurement = self._run(trial, number, limit_s)
        self.store.append(measurement)
        return measurement

    def shared_trial(self, trial: Trial) -> Trial | None:
        """What can change between two steps takes turns, unless whole epochs are timed."""
        switched = self.switchable_fields(self.workload, trial.plan)
        if not switched or trial.plan.epochs is not None or trial.plan.batch is None:
            return None
        return Trial(plan=trial.plan, variant=interleave.process_wide(trial.variant, switched))

    def measure_interleaved(
        self, trials: Sequence[Trial], number: int, limit_s: float | None = None
    ) -> list[Measurement]:
        """Run, and keep each."""
        left_out = tuple(rung.variant for rung in trials)
        shared = self.shared_trial(trials[0])
        assert shared is not None
        whole = self._run(shared, number, limit_s, left_out)
        found = split_by_variant(whole, left_out)
        if whole.status == "ok":
            # What had no turn before a script ended is nothing to find again.
            for measurement in filter(ranks_with_windows, found):
                self.store.append(measurement)
        return found

    def _run(
        self,
        trial: Trial,
        number: int,
        limit_s: float | None,
        variants: tuple[Variant, ...] = (),
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
        """By the number of training samples."""
        return None if not self.training_samples else -(-self.training_samples // (plan.batch or 1))
