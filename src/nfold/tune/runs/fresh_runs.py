"""The runs of ``nfold tune``, each in a fresh process tree: their times, losses and failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from nfold.core.measurement import Measurement
from nfold.core.stats import Interval, median
from nfold.explain.design import Trial
from nfold.explain.result.budget import Budget
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import WorkloadRunner, failure_reason
from nfold.launch.training_checks import TRAINING_KINDS
from nfold.tune.remedies import CONVERTED_STRATEGY, Remedy, largest_change
from nfold.tune.result import Tried
from nfold.tune.runs.losses import Losses, LossReference, first_losses, sample_hash
from nfold.tune.runs.run_series import RunSeries

MIN_GAIN = 1.01
LEAST_LIMIT_S, LIMIT_FACTOR, LONGEST_LIMIT_S = 120.0, 3.0, 300.0  # of a run; it may compile
FIRST_REPEAT = 1001  # numbers of repeats that no explanation uses


class TuneEvents:
    """Callbacks of a search. The base class ignores all events."""

    def explaining(self, kept: Collection[Remedy], remaining_s: float) -> None:
        """An explanation starts, with ``kept`` applied."""

    def explained(self, budget: Budget) -> None: ...

    def trying(self, what: str, remaining_s: float) -> None:
        """A run starts."""

    def decided(self, tried: Tried) -> None:
        """A remedy was kept or not."""

    def verifying(self, remaining_s: float) -> None: ...


@dataclass
class FreshRuns:
    """Runs of the original and of trials with remedies, in the order in which they are made.

    ``original`` is the trial without remedies. Trials with the strategy of a conversion are run by
    ``converted_runner``, others by ``runner``. A run that ends with a warning of wrong training has
    failed, unless the original has the same: its kinds are ``author_caveats``.
    ``draws_random_numbers``: whether the model draws some, as for dropout. A run gets more than the
    usual time limit only from what ``reserved_s``, the seconds for the verification, leaves.
    """

    runner: WorkloadRunner
    time_budget: TimeBudget
    events: TuneEvents
    original: Trial
    reserved_s: Callable[[], float]
    author_caveats: frozenset[str] = frozenset()
    draws_random_numbers: bool = False
    converted_runner: WorkloadRunner | None = None
    failures: dict[Trial, str] = field(default_factory=dict)
    series: RunSeries = field(default_factory=RunSeries)
    _losses: dict[object, list[Losses]] = field(default_factory=dict)
    _samples: dict[object, tuple[int, int] | None] = field(default_factory=dict)
    _seconds: list[float] = field(default_factory=list)
    _last_seconds: dict[object, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self._seconds)

    def measure(self, trial: Trial, label: str = "the best so far") -> bool:
        """Run ``trial`` once more; return whether it was measured."""
        found = self.run_once(trial, label)
        if found is not None:
            self.series.add(trial, found)
        return found is not None

    def run_once(
        self, trial: Trial, label: str, runner: WorkloadRunner | None = None, key: object = None
    ) -> float | None:
        """Return the milliseconds per sample of a run, None if it failed.

        Its seconds, losses and samples are kept under ``key``, by default the trial.
        """
        key = key or trial
        measurement = self.run(trial, label, runner or self.runner_of(trial))
        self._last_seconds[key] = self._seconds[-1]
        if isinstance(measurement, str):
            self.failures[trial] = measurement
            return None
        if losses := first_losses(measurement):
            self._losses.setdefault(key, []).append(losses)
        self._samples[key] = sample_hash(measurement)
        step_ms = trial.step_and_gap_ms(measurement)
        assert step_ms is not None  # else it has failed
        return step_ms / (trial.plan.batch or 1)

    def run(self, trial: Trial, label: str, runner: WorkloadRunner) -> Measurement | str:
        """Return the measurement of a run, or why it failed."""
        before_s = self.time_budget.remaining_s
        self.events.trying(label, before_s)
        # Compilation and searches are over before the steps that count.
        spare_s = min(LONGEST_LIMIT_S, before_s - self.reserved_s())
        limit_s = max(LEAST_LIMIT_S, LIMIT_FACTOR * self.typical_s, spare_s)
        measurement = runner.measure(trial, FIRST_REPEAT + self.count, limit_s)
        self._seconds.append(before_s - self.time_budget.remaining_s)
        return _failure(trial, measurement, self.author_caveats) or measurement

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
    def typical_s(self) -> float:
        """Seconds of a run."""
        return median(self._seconds) if self._seconds else 0.0

    def seconds_of(self, key: object) -> float:
        """Return the seconds of the last run of a trial, or of another key of run_once."""
        return self._last_seconds.get(key, self.typical_s)

    def objection(self, key: object, remedies: Collection[Remedy]) -> str | None:
        """Return how the last run trains another way than ``remedies`` allow, or None."""
        losses = self._losses.get(key)
        if not losses:
            return None
        return LossReference(tuple(self._losses.get(self.base, ()))).objection(
            losses[-1],
            largest_change(remedies),
            has_other_draws=self._has_other_draws(key, remedies),
        )

    def _has_other_draws(self, key: object, remedies: Collection[Remedy]) -> bool:
        """Return whether a run has the samples of the original, but other random numbers.

        A data set that augments its samples draws them in the loader's workers. A model draws them
        for dropout: compiled, or in another memory layout, it draws others.
        """
        samples = self._samples.get(key)
        if samples is None or samples != self._samples.get(self.base):
            return False
        computes_otherwise = largest_change(remedies) == "rounding"
        in_model = self.draws_random_numbers and computes_otherwise
        return in_model or any(one.has_other_draws for one in remedies)

    def loss_summary(self, final: Trial, kept: Sequence[Remedy]) -> str:
        """Return how the losses of the original were compared with those of ``final``."""
        if not self._losses.get(self.original):
            return "losses were not compared: the script calls no backward on a loss"
        reference = LossReference(tuple(self._losses[self.original]))
        if not reference.is_repeatable:
            return "losses of two runs of the original differ: only their means were compared"
        losses = self._losses.get(final, [()])[-1]
        differs = reference.objection(losses, largest_change(kept)) is not None
        if differs and self._has_other_draws(final, kept):
            return (
                "other random numbers are drawn, as for dropout or augmentation: samples and mean "
                "losses compared"
            )
        return f"first {len(reference.runs[0])} losses compared"


def _failure(trial: Trial, measurement: Measurement, known: Collection[str]) -> str | None:
    """Return why a run does not count, or None. The original has the caveats ``known``."""
    if measurement.status != "ok":
        return failure_reason(measurement)
    kinds = set(TRAINING_KINDS).difference(known)
    wrong = next((one.text for one in measurement.warnings if one.kind in kinds), None)
    if wrong is not None:
        return f"wrong training: {wrong}"
    return None if "step" in trial.metrics(measurement) else "it ended before its timed steps"
