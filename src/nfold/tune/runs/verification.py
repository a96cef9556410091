"""Compares the original with the result of ``nfold tune`` in runs that took no part in choosing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from nfold.core.stats import Interval
from nfold.explain.trials import WorkloadRunner
from nfold.launch.launch_spec import StopRequest
from nfold.tune.remedies import Remedy, apply_all
from nfold.tune.result import EditedCopy, Verification
from nfold.tune.runs.fresh_runs import Arm, FreshRuns
from nfold.tune.runs.pair_series import NoisePool, PairSeries, is_precise, t_quantile

LEAST_PAIRS, USUAL_PAIRS, MAX_PAIRS = 2, 3, 6
EXPECTED_PART = 0.5  # of a gain that the search found: fresh runs often show less
ORIGINAL, FINAL, COPY = "original", "final", "copy"


def pairs_to_confirm(gain: Interval | None, noise: NoisePool) -> int:
    """Return how many pairs of runs confirm a gain in this noise, at most as many as are run."""
    if gain is None or gain.value <= 1:
        return LEAST_PAIRS
    of_one_pair = t_quantile(noise.degrees_of_freedom) * noise.deviation
    needed = (of_one_pair / (EXPECTED_PART * math.log(gain.value))) ** 2
    return max(LEAST_PAIRS, min(MAX_PAIRS, math.ceil(needed)))


@dataclass
class FinalComparison:
    """Pairs of runs: the original, and in turn the settings that are kept and an edited copy.

    The copy has the same settings in its source. If it is faster than the original and trains the
    same, its runs count for the gain as those of the settings do.
    """

    runs: FreshRuns
    kept: Collection[Remedy]
    stop: StopRequest
    copy: EditedCopy | None = None
    copy_runner: WorkloadRunner | None = None
    _series: PairSeries = field(default_factory=PairSeries)
    _failures: dict[str, str] = field(default_factory=dict)

    def verify(self) -> Verification:
        """Run pairs until the gain is precise or the time ends, and two at least."""
        runs, original = self.runs, self.runs.original
        final = runs.arm(apply_all(self.kept, original))
        arms = {FINAL: final}
        if self.copy is not None and self.copy_runner is not None:
            # With all of its remedies in its source, an edited copy runs the trial of the original.
            trial = apply_all(self.copy.at_run_time, runs.base)
            arms[COPY] = Arm(trial, self.copy_runner, COPY)
        for number in range(MAX_PAIRS):
            is_copy = number % 2 == 1 and COPY in arms and COPY not in self._failures
            name = COPY if is_copy else FINAL
            if self.stop or self._is_enough(number, runs.seconds_of(arms[name].key)):
                break
            self._run(name, arms[name])
        objection = self._failures.get(FINAL) or runs.objection(final.key, self.kept)
        if objection is None and any(one.is_in_source_only for one in self.kept):
            not_run = None if self._series.count(COPY) else "it did not run"
            found = self._objection_to_copy() or not_run
            objection = found and f"the edited copy of the script: {found}"
        pairs, batch = self._pairs_that_count, original.plan.batch or 1
        return Verification(
            gain=self._gain(pairs),
            original_ms=pairs.step_ms(ORIGINAL, batch),
            final_ms=pairs.step_ms(FINAL, batch),
            objection=objection,
            pairs=pairs.count(FINAL),
            copy=self.copy,
            copy_objection=self._objection_to_copy(),
        )

    def _is_enough(self, number: int, needed_s: float) -> bool:
        """Return whether ``number`` pairs suffice, or the next, of ``needed_s``, comes too late."""
        if FINAL in self._failures:
            return True
        pairs = self._pairs_that_count
        gain = self._gain(pairs)
        if number >= USUAL_PAIRS and gain is not None and is_precise(gain):
            return True
        is_late = needed_s > self.runs.time_budget.remaining_s
        return is_late and pairs.count(FINAL) >= LEAST_PAIRS

    def _run(self, name: str, arm: Arm) -> None:
        runs, alternated = self.runs, self.runs.alternates
        pair = runs.run_pair(runs.arm(runs.original), arm, f"verifying: {name}")
        if runs.alternates != alternated:
            self._series = PairSeries()
        if pair is not None:
            pair = dataclasses.replace(pair, old=ORIGINAL, new=name)
            self._series.pairs.append(pair)
        elif arm.key in runs.failures:
            self._failures[name] = runs.failures[arm.key]

    @property
    def _pairs_that_count(self) -> PairSeries:
        """The pairs with the settings, and with the copy if nothing is wrong with it."""
        is_good = self._objection_to_copy() is None
        return self._pairs_of(FINAL, COPY) if is_good else self._pairs_of(FINAL)

    def _pairs_of(self, *names: str) -> PairSeries:
        """Return the pairs with ``names``, all under the one name FINAL."""
        found = [one for one in self._series.pairs if one.new in names]
        return PairSeries([dataclasses.replace(one, new=FINAL) for one in found])

    def _gain(self, pairs: PairSeries) -> Interval | None:
        noise = self.runs.series.noise().merge(pairs.noise())
        return pairs.gain(ORIGINAL, FINAL, noise)

    def _objection_to_copy(self) -> str | None:
        """Return how the edited copy failed or differs from the final settings, or None."""
        if COPY in self._failures:
            return self._failures[COPY]
        if not self._series.count(COPY):
            return None
        objection, gain = self.runs.objection(COPY, self.kept), self._gain(self._pairs_of(COPY))
        if objection is None and (gain is None or gain.low is None or gain.low <= 1):
            found = f"{gain.value:.2f} ×" if gain is not None else "not measured"
            objection = f"it is not certainly faster than the original ({found})"
        return objection
