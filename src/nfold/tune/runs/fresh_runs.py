"""The runs of ``nfold tune``, each in a fresh process tree: their times, losses and failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from nfold.core.measurement import Measurement
from nfold.core.stats import Interval, median
from nfold.explain.design import Trial
from nfold.explain.result.budget import Budget
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import WorkloadRunner, failure_reason
from nfold.launch.training_checks import TRAINING_KINDS
from nfold.tune.remedies import CONVERTED_STRATEGY, Remedy
from nfold.tune.result import Tried
from nfold.tune.runs.alternating_runs import (
    CannotAlternateError,
    check_alternation,
    log_ratio,
    run_alternating,
)
from nfold.tune.runs.loss_record import LossRecord
from nfold.tune.runs.pair_series import Pair, PairSeries

MIN_GAIN = 1.01
LEAST_LIMIT_S, LIMIT_FACTOR, LONGEST_LIMIT_S = 120.0, 3.0, 300.0  # of a run; it may compile
NOISE_LABEL = "the original against itself"
FIRST_REPEAT = 1001  # numbers of repeats that no explanation uses


class TuneEvents:
    """Callbacks of a search. The base class ignores all events."""

    def explaining(self, kept: Collection[Remedy], remaining_s: float) -> None:
        """An explanation starts, with ``kept`` applied."""

    def explained(self, budget: Budget) -> None: ...

    def trying(self, what: str, remaining_s: float) -> None:
        """A run or a pair of runs starts."""

    def decided(self, tried: Tried) -> None:
        """A remedy was kept or not."""

    def verifying(self, remaining_s: float) -> None: ...


@dataclass(frozen=True)
class Arm:
    """One side of a pair: a trial and who runs it. Its losses are kept under ``key``."""

    trial: Trial
    runner: WorkloadRunner
    key: object


@dataclass
class FreshRuns:
    """Pairs of runs: of the original, and of trials with remedies.

    ``original`` is the trial without remedies. Trials with the strategy of a conversion are run by
    ``converted_runner``, others by ``runner``. A run that ends with a warning of wrong training has
    failed, unless the original has the same: its kinds are ``author_caveats``. A run gets more than
    the usual time limit only from what ``reserved_s``, the seconds for the verification, leaves.

    If ``alternates``, the two runs of a pair alternate, until a pair cannot; then, and otherwise, one
    runs after the other. ``failures``: why the last run of a key failed.
    """

    runner: WorkloadRunner
    time_budget: TimeBudget
    events: TuneEvents
    original: Trial
    reserved_s: Callable[[], float]
    author_caveats: frozenset[str] = frozenset()
    losses: LossRecord = field(default_factory=LossRecord)
    alternates: bool = False
    converted_runner: WorkloadRunner | None = None
    failures: dict[object, str] = field(default_factory=dict)
    series: PairSeries = field(default_factory=PairSeries)
    _pair_seconds: dict[object, list[float]] = field(default_factory=dict)
    _run_count: int = 0

    def measure(self, old: Trial, new: Trial, label: str) -> str | None:
        """Run a pair for the series; return why one of the two failed, or None."""
        arms = self.arm(old), self.arm(new)
        pair = self.run_pair(*arms, label)
        if pair is not None:
            self.series.pairs.append(pair)
            return None
        return (
            self.failures.get(arms[1].key)
            or f"the run beside it failed: {self.failures[arms[0].key]}"
        )

    def run_pair(self, old: Arm, new: Arm, label: str) -> Pair | None:
        """Run both once; None if one failed.

        If pairs cannot alternate any more, the series begins anew: its noise is another one.
        """
        before_s = self.time_budget.remaining_s
        try:
            if self.alternates:
                pair = self._alternating_pair(old, new, label)
        except CannotAlternateError:
            self.alternates, self.series = False, PairSeries()
            original = self.arm(self.original)
            if (old, new) != (original, original):
                first = self._successive_pair(original, original, NOISE_LABEL)
                self.series.pairs += [first] if first is not None else []
            before_s = self.time_budget.remaining_s
        if not self.alternates:
            pair = self._successive_pair(old, new, label)
        seconds = before_s - self.time_budget.remaining_s
        self._pair_seconds.setdefault(new.key, []).append(seconds)
        return pair

    def _alternating_pair(self, old: Arm, new: Arm, label: str) -> Pair | None:
        """Run both, alternating. Raises CannotAlternateError if they would run one after the other."""
        self.events.trying(label, self.time_budget.remaining_s)
        arms, limit_s = (old, new), self._limit_s()
        found = run_alternating(
            *(
                partial(arm.runner.measure_alternating, arm.trial, self._next_number(), limit_s)
                for arm in arms
            )
        )
        for arm, one in zip(arms, found, strict=True):
            arm.runner.store.append(one)
        check_alternation(*found, are_equal=old == new)
        times = [self._noted(arm, one) for arm, one in zip(arms, found, strict=True)]
        if times[0] is None or times[1] is None:
            return None
        log_steps = log_ratio((old.trial, found[0]), (new.trial, found[1]))
        log_batches = math.log((new.trial.plan.batch or 1) / (old.trial.plan.batch or 1))
        return Pair(old.key, new.key, times[0], times[1], log_batches - log_steps)

    def _successive_pair(self, old: Arm, new: Arm, label: str) -> Pair | None:
        """Run one after the other: every other pair in the reverse order, so that drift cancels."""
        times: dict[object, list[float]] = {}
        number = len(self._pair_seconds.get(new.key, ()))
        for arm in (old, new) if number % 2 else (new, old):
            ms = self._noted(arm, self._run(arm.trial, label, arm.runner))
            if ms is None:
                return None
            times.setdefault(arm.key, []).append(ms)
        old_ms, new_ms = times[old.key][0], times[new.key][-1]
        return Pair(old.key, new.key, old_ms, new_ms, math.log(old_ms / new_ms))

    def _noted(self, arm: Arm, found: Measurement) -> float | None:
        """Keep the losses and samples of a run; return its milliseconds per sample, None if it failed."""
        failure = _failure(arm.trial, found, self.author_caveats)
        if failure is not None:
            self.failures[arm.key] = failure
            return None
        self.failures.pop(arm.key, None)
        self.losses.note(arm.key, found)
        step_ms = arm.trial.step_and_gap_ms(found)
        assert step_ms is not None  # else it has failed
        return step_ms / (arm.trial.plan.batch or 1)

    def run(self, trial: Trial, label: str, runner: WorkloadRunner) -> Measurement | str:
        """Return the measurement of a run alone, or why it failed."""
        measurement = self._run(trial, label, runner)
        return _failure(trial, measurement, self.author_caveats) or measurement

    def _run(self, trial: Trial, label: str, runner: WorkloadRunner) -> Measurement:
        self.events.trying(label, self.time_budget.remaining_s)
        return runner.measure(trial, self._next_number(), self._limit_s())

    def _next_number(self) -> int:
        self._run_count += 1
        return FIRST_REPEAT + self._run_count

    def _limit_s(self) -> float:
        # Compilation and searches are over before the steps that count.
        spare_s = min(LONGEST_LIMIT_S, self.time_budget.remaining_s - self.reserved_s())
        return max(LEAST_LIMIT_S, LIMIT_FACTOR * self.typical_s, spare_s)

    def arm(self, trial: Trial) -> Arm:
        return Arm(trial, self.runner_of(trial), trial)

    def runner_of(self, trial: Trial) -> WorkloadRunner:
        is_converted = trial.plan.strategy == CONVERTED_STRATEGY
        return self.converted_runner or self.runner if is_converted else self.runner

    @property
    def base(self) -> Trial:
        """The trial without remedies, with the samples in the order that trials with remedies have."""
        if self.converted_runner is None:
            return self.original
        return self.original.edit(strategy=CONVERTED_STRATEGY)

    def gain(self, old: Trial, new: Trial) -> Interval | None:
        return self.series.gain(old, new, self.series.noise())

    @property
    def threshold(self) -> float:
        """The least gain that the noise between equal runs does not hide."""
        noise = self.series.noise()
        if noise.degrees_of_freedom == 0:
            return MIN_GAIN
        return max(MIN_GAIN, math.exp(noise.deviation))

    @property
    def pair_count(self) -> int:
        return sum(map(len, self._pair_seconds.values()))

    @property
    def typical_s(self) -> float:
        """Seconds of a pair."""
        seconds = [one for found in self._pair_seconds.values() for one in found]
        return median(seconds) if seconds else 0.0

    def seconds_of(self, key: object) -> float:
        """Return the seconds of the last pair in which a trial, or another key, was new."""
        return self._pair_seconds.get(key, [self.typical_s])[-1]

    def objection(self, key: object, remedies: Collection[Remedy]) -> str | None:
        """Return how the last run trains another way than ``remedies`` allow, or None."""
        return self.losses.objection(self.base, key, remedies)


def _failure(trial: Trial, measurement: Measurement, known: Collection[str]) -> str | None:
    """Return why a run does not count, or None. The original has the caveats ``known``."""
    if measurement.status != "ok":
        return failure_reason(measurement)
    kinds = set(TRAINING_KINDS).difference(known)
    wrong = next((one.text for one in measurement.warnings if one.kind in kinds), None)
    if wrong is not None:
        return f"wrong training: {wrong}"
    return None if "step" in trial.metrics(measurement) else "it ended before its timed steps"
