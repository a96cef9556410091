"""Compares the original with the result of ``nfold tune`` in runs that took no part in choosing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from nfold.core.stats import Interval
from nfold.explain.design import Trial
from nfold.explain.trials import WorkloadRunner
from nfold.launch.launch_spec import StopRequest
from nfold.tune.remedies import Remedy, apply_all
from nfold.tune.result import EditedCopy, Verification
from nfold.tune.runs.fresh_runs import FreshRuns
from nfold.tune.runs.run_series import RunSeries, is_precise

LEAST_PAIRS, USUAL_PAIRS, MAX_PAIRS = 2, 3, 6
ORIGINAL, FINAL, COPY = "original", "final", "copy"


@dataclass
class FinalComparison:
    """Alternating runs of the original, of the settings that are kept, and of an edited copy."""

    runs: FreshRuns
    kept: Collection[Remedy]
    stop: StopRequest
    copy: EditedCopy | None = None
    copy_runner: WorkloadRunner | None = None
    _series: RunSeries = field(default_factory=RunSeries)
    _failures: dict[str, str] = field(default_factory=dict)

    def verify(self) -> Verification:
        """Run them until the gain is precise or the time ends, and twice at least."""
        runs, original = self.runs, self.runs.original
        batch, final = original.plan.batch or 1, apply_all(self.kept, original)
        arms = {ORIGINAL: (original, runs.runner), FINAL: (final, runs.runner_of(final))}
        if self.copy is not None and self.copy_runner is not None:
            arms[COPY] = (apply_all(self.copy.at_run_time, runs.base), self.copy_runner)
        gain: Interval | None = None
        for number in range(MAX_PAIRS):
            enough = number >= USUAL_PAIRS and gain is not None and is_precise(gain)
            needed_s = sum(runs.seconds_of(_key(name, trial)) for name, (trial, _) in arms.items())
            late = number >= LEAST_PAIRS and needed_s > runs.time_budget.remaining_s
            if self.stop or enough or late:
                break
            for name, (trial, runner) in [*arms.items()][:: 1 if number % 2 else -1]:
                self._run(name, trial, runner)
            gain = self._gain(FINAL)
        return Verification(
            gain=gain,
            original_ms=self._series.step_ms(ORIGINAL, batch),
            final_ms=self._series.step_ms(FINAL, batch),
            objection=self._failures.get(FINAL) or runs.objection(final, self.kept),
            pairs=self._series.count(FINAL),
            copy=self.copy,
            copy_objection=self._failures.get(COPY) or self._objection_to_copy(),
        )

    def _run(self, name: str, trial: Trial, runner: WorkloadRunner) -> None:
        found = self.runs.run_once(trial, f"verifying: {name}", runner, _key(name, trial))
        if found is None:
            self._failures[name] = self.runs.failures[trial]
        else:
            self._series.add(name, found)

    def _gain(self, name: str) -> Interval | None:
        noise = self.runs.series.noise().merge(self._series.noise())
        return self._series.gain(ORIGINAL, name, noise)

    def _objection_to_copy(self) -> str | None:
        """Return how the edited copy differs from the final settings, or None."""
        if not self._series.count(COPY):
            return None
        objection, gain = self.runs.objection(COPY, self.kept), self._gain(COPY)
        if objection is None and (gain is None or gain.low is None or gain.low <= 1):
            found = f"{gain.value:.2f} ×" if gain is not None else "not measured"
            objection = f"it is not faster than the original ({found})"
        return objection


def _key(name: str, trial: Trial) -> object:
    # With all of its remedies in its source, an edited copy runs the trial of the original.
    return COPY if name == COPY else trial
