"""The search of ``nfold tune``: explain, try remedies, keep what wins, verify in fresh runs.

Every try is a run in a fresh process tree, alternating with runs of the best settings so far. A
remedy is kept if its gain is above 1 %, with an interval that allows for the number of remedies. It
is given up if it gains less than the noise between runs of equal settings. If there is no time to
try all of them alone, the one from which the explanation expects most is tried first, then those that
work on the input, the computation and the communication, each group together. Kept ones are dropped
again if training is as fast without them. The final gain comes from runs that took no part in
choosing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from nfold.core.errors import RunFailure
from nfold.core.measurement import Measurement
from nfold.core.plan import WARMUP_STEPS, Plan
from nfold.core.script_profile import ScriptProfile
from nfold.core.stats import Interval, median
from nfold.explain.attribution import build_budget
from nfold.explain.design import ExperimentDesign, Trial, prefetched_batches
from nfold.explain.experiment import Experiment, TimeBudget
from nfold.explain.result.budget import Budget
from nfold.explain.trials import WorkloadRunner, failure_reason
from nfold.launch.launch_spec import StopRequest
from nfold.launch.training_checks import TRAINING_KINDS
from nfold.tune.conversion.conversion_check import run_check
from nfold.tune.losses import Losses, LossReference, first_losses, sample_hash
from nfold.tune.plan_fields import EXCLUDED_WITH_RUN
from nfold.tune.remedies import (
    CONVERSION,
    CONVERTED_STRATEGY,
    PlanCompletion,
    Remedy,
    apply_all,
    choose_remedies,
    conversion_to,
    groups_to_try,
    largest_change,
    values_to_try,
)
from nfold.tune.result import ConvertedScript, EditedCopy, Tried, TuneResult, Verification
from nfold.tune.run_series import RunSeries, is_gain, is_precise

SEED = 1
RUN_S = 4.0  # of timed steps in a run: runs differ more than the steps of one
MIN_STEPS, MAX_STEPS, MAX_WARM_UP = 20, 400, 40
MIN_GAIN = 1.01
EXPLAIN_FRACTION, AGAIN_FRACTION = 0.3, 0.15  # of the time budget
MAX_RUNS_BETWEEN = 3  # of others, between two runs of the best so far
LEAST_VERIFYING_PAIRS, VERIFYING_PAIRS = 2, 3
MAX_VERIFYING_PAIRS = 6
MAX_TRIES = 4  # runs of one remedy
RUNS_PER_REMEDY = 3  # with less time, remedies are first tried together
LEAST_LIMIT_S, LIMIT_FACTOR, LONGEST_LIMIT_S = 120.0, 3.0, 300.0  # of a run; it may compile
COPY = "copy"
FIRST_REPEAT = 1000  # numbers of repeats that no explanation uses

ExplainStep = Callable[[WorkloadRunner, float], tuple[ExperimentDesign, Experiment]]
"""Explains within so many seconds; the runner applies the remedies that are kept."""
EditScript = Callable[[tuple[Remedy, ...], ScriptProfile, EditedCopy], EditedCopy]
"""Writes an edited copy of a script with the remedies that are kept, as far as edits keep them.

The last argument has the edits that the copy has besides, those of a conversion.
"""
ConvertScript = Callable[[ScriptProfile], ConvertedScript]
"""Writes copies of a script that nfold.Run makes data-parallel."""


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


@dataclass(frozen=True, kw_only=True)
class TrialComparison:
    """The gain of a trial over the best so far; or why it failed, or how it trains another way."""

    gain: Interval | None = None
    failure: str = ""
    objection: str = ""


@dataclass
class Search:
    """One tuning while it runs. ``allowed``: permissions of remedies that change the training."""

    runner: WorkloadRunner
    explain: ExplainStep
    time_budget: TimeBudget
    events: TuneEvents
    stop: StopRequest
    cores: int
    edit_script: EditScript
    convert_script: ConvertScript
    allowed: frozenset[str] = frozenset()
    tried: list[Tried] = field(default_factory=list)
    kept: list[Remedy] = field(default_factory=list)
    _series: RunSeries = field(default_factory=RunSeries)
    _losses: dict[object, list[Losses]] = field(default_factory=dict)
    _samples: dict[object, tuple[int, int] | None] = field(default_factory=dict)
    _failures: dict[Trial, str] = field(default_factory=dict)
    _converted: ConvertedScript | None = None
    _converted_runner: WorkloadRunner | None = None
    _conversion_losses: str = ""
    _author_caveats: frozenset[str] = frozenset()
    _runs: int = 0
    _run_seconds: list[float] = field(default_factory=list)

    def run(self) -> TuneResult:
        """Return what was kept and what was tried. Raises RunFailure if the original does not run.

        After a request to stop, the best settings so far are the result, if they were verified.
        """
        design, budget = self._explained(EXPLAIN_FRACTION)
        original = self._original(design, budget.n_devices.step_ms.value / 1e3)
        if budget.training_errors:
            error = budget.training_errors[0]
            hint = "" if "next: " in error else "; next: correct it, then nfold tune again"
            raise RunFailure(f"wrong training: {error}{hint}")
        self._author_caveats = frozenset(caveat.kind for caveat in design.probe_caveats)
        for _ in range(2):
            self._measure(original)
        if self._series.count(original) == 0:
            raise RunFailure(f"the original cannot be run: {self._failures[original]}")
        self._convert(design, original)
        left = self._search(design, budget, original)
        self._try_pairs(original)
        self._prune(self._kept_after_conversion, original)
        verification = self._verify(original, design.profile)
        return TuneResult(
            target=str(self.runner.workload),
            devices=design.devices,
            original=original,
            final=apply_all(self.kept, original),
            kept=tuple(self.kept),
            tried=tuple(self.tried),
            verification=verification,
            losses=self._loss_summary(original),
            budget=budget,
            final_budget=left if self.kept else budget,
            profile=design.profile,
            stopped=bool(self.stop),
            sufficient_s=self._sufficient_s,
        )

    @property
    def _sufficient_s(self) -> float:
        """A time budget that would also have tried each remedy for which there was no time."""
        untried = sum(one.outcome == "not tried" for one in self.tried)
        runs = self._runs + RUNS_PER_REMEDY * untried + self._verifying_runs
        return runs * self._typical_run_s / (1 - EXPLAIN_FRACTION - AGAIN_FRACTION)

    def _explained(self, fraction: float) -> tuple[ExperimentDesign, Budget]:
        self.events.explaining(self.kept, self.time_budget.remaining_s)
        seconds = fraction * self.time_budget.budget_s
        design, experiment = self.explain(self.runner, seconds)
        if design.profile is not None:
            self.runner = self.runner.with_profile(design.profile)
        budget = build_budget(str(self.runner.workload), design, experiment.results)
        self.events.explained(budget)
        return design, budget

    def _original(self, design: ExperimentDesign, step_s: float) -> Trial:
        """Return the trial without remedies, long enough for any number of workers."""
        workers = max(design.plan.workers or 0, *values_to_try("workers", design, self.cores), 0)
        warm_up = min(MAX_WARM_UP, WARMUP_STEPS + prefetched_batches(workers))
        steps = max(MIN_STEPS, min(MAX_STEPS, round(RUN_S / step_s)))
        epoch = (design.facts.training_loader.batches_per_epoch or 0) // design.plan.accumulate
        if epoch < warm_up + steps:
            # Code may be compiled again for the last batch of the first epoch: before the timed steps.
            warm_up = max(warm_up, epoch + 1)
        trial = design.actual().edit(steps=steps, epochs=None, warmup_steps=warm_up)
        return trial.under(random_seed=SEED) if design.profile is not None else trial

    def _convert(self, design: ExperimentDesign, original: Trial) -> None:
        """Try a script of one process with nfold.Run on all devices."""
        if design.profile is None or not design.uses_one_process:
            return
        found, remedy = self.convert_script(design.profile), conversion_to(design)
        trial = remedy.apply(original)
        if found.obstacle:
            self._note(remedy, "refused", reason=found.obstacle)
        elif self.stop or not self._time_for(4):
            self._note(remedy, "not tried", reason="no time was left")
        else:
            check = run_check(found, self.runner, original, trial, self._run_fresh)
            objection = check if isinstance(check, str) else check.objection()
            if isinstance(check, str) or objection is not None:
                outcome = "failed" if isinstance(check, str) else "changes training"
                self._note(remedy, outcome, reason=objection or "")
                return
            self._conversion_losses = check.summary
            self._converted_runner = self.runner.with_converted(found.copy.sources)
            self._decide(remedy, original, trial, original)
            if remedy in self.kept:
                self._converted = found
            else:
                self._converted_runner = None

    def _search(self, design: ExperimentDesign, budget: Budget, original: Trial) -> Budget | None:
        """Try all remedies; after the first round explain again what is left, and return that.

        On a converted script those are tried that nfold.Run does not choose by itself.
        """
        refusal = self.runner.refusal_reason
        remedies = choose_remedies(design, budget, self.cores, self.allowed, refusal)
        if self._converted is not None:
            remedies = [one for one in remedies if one.name not in EXCLUDED_WITH_RUN]
        if not self._time_for(RUNS_PER_REMEDY * len(remedies)):
            self._try_all([one for one in remedies[:1] if one.is_promising], original)
            decided = {one.remedy.name for one in self.tried}
            others = [one for one in remedies if one.name not in decided]
            for group in groups_to_try(others):
                self._try_together(group, original)
        self._try_all(remedies, original)
        again_s = AGAIN_FRACTION * self.time_budget.budget_s
        if not self.kept or self._converted or self.stop or not self._time_for(1, extra_s=again_s):
            return None
        runner, self.runner = self.runner, self._runner_with_kept()
        try:
            later, left = self._explained(AGAIN_FRACTION)
        except RunFailure:
            return None
        finally:
            self.runner = runner
        known = {(one.remedy.name, one.remedy.value) for one in self.tried}
        more = choose_remedies(later, left, self.cores, self.allowed, refusal)
        # A batch was doubled as far as that helped.
        new = [o for o in more if (o.name, o.value) not in known and o.name != "batch"]
        self._try_all([one for one in new if one.apply(original) != original], original)
        return left

    def _runner_with_kept(self) -> WorkloadRunner:
        fields = {k: v for r in self.kept if r.is_plan_field for k, v in r.fields.items()}
        kept = apply_all(self.kept, Trial(plan=Plan()))
        return self.runner.with_remedies(fields, kept.variant)

    def _try_together(self, remedies: Sequence[Remedy], original: Trial) -> None:
        """Keep all of ``remedies`` if they help together, and drop those that are not needed.

        If they fail or change the training, each half is tried. What is not kept can still be tried
        alone.
        """
        best = trial = apply_all(self.kept, original)
        group: list[Remedy] = []
        for one in remedies:
            complete = self._complete(one, trial, [*self.kept, *group])
            if self._is_allowed(complete.apply(trial)):
                group.append(complete)
                trial = complete.apply(trial)
        if not group or self.stop or not self._time_for(2):
            return
        if len(group) == 1:
            self._decide(group[0], best, trial, original)
            return
        found = self._compare(best, trial, f"{len(group)} remedies together", original, *group)
        if found.failure or found.objection:
            self._try_parts(group, found.failure, original)
        elif self._is_gain(found.gain):
            self.kept += group
            for one in group:
                reason = f"together with {len(group) - 1} others"
                self._note(one, "kept", gain=found.gain, reason=reason)
            self._prune_halves(group, original)

    def _try_parts(self, group: list[Remedy], failure: str, original: Trial) -> None:
        """Try those that ``failure`` does not name, or each half if it names none."""
        named = [one for one in group if f"{one.name}: " in failure]
        for one in named:
            self._note(one, "refused", reason=failure)
        middle = 0 if named else len(group) // 2
        for part in (group[:middle], group[middle:]):
            self._try_together([one for one in part if one not in named], original)

    def _complete(self, remedy: Remedy, trial: Trial, kept: Collection[Remedy]) -> Remedy:
        """Return the remedy with the fields of the plan that it needs, if there are such."""
        if not remedy.is_plan_field:
            return remedy
        completion = PlanCompletion(self.cores, self.allowed, self.runner.refusal_reason)
        return completion.complete(remedy, trial, kept) or remedy

    def _is_allowed(self, trial: Trial) -> bool:
        return self.runner.refusal_reason(trial) is None

    def _try_all(self, remedies: list[Remedy], original: Trial) -> None:
        """Try each remedy on top of those that are kept, and decide."""
        left = [*remedies]
        while left:
            best = apply_all(self.kept, original)
            remedy = self._complete(left.pop(0), best, self.kept)
            trial = remedy.apply(best)
            if trial == best or any(one.remedy == remedy for one in self.tried):
                continue
            refusal = self.runner.refusal_reason(trial)
            if refusal is not None:
                self._note(remedy, "refused", reason=refusal)
            elif self.stop or not self._time_for(1):
                self._note(remedy, "not tried", reason="no time was left")
            else:
                self._decide(remedy, best, trial, original)
                further = remedy.further(self.cores, original.plan)
                if remedy in self.kept and further is not None and further not in left:
                    left.insert(0, further)

    def _decide(self, remedy: Remedy, best: Trial, trial: Trial, original: Trial) -> None:
        """Keep the remedy if it is faster and trains the same."""
        found = self._compare(best, trial, remedy.label, original, remedy)
        if found.failure:
            self._note(remedy, "failed", reason=found.failure)
        elif found.objection:
            self._note(remedy, "changes training", reason=found.objection)
        elif self._is_gain(found.gain):
            self._replace_values(remedy)
            self.kept.append(remedy)
            self._note(remedy, "kept", gain=found.gain)
        else:
            self._note(remedy, "no gain", gain=found.gain)

    def _compare(
        self, best: Trial, trial: Trial, label: str, original: Trial, *tried: Remedy
    ) -> TrialComparison:
        """Run both alternately until the interval of the gain decides; ``tried`` are in ``trial``."""
        gain = None
        for number, is_measured in enumerate(self._alternate(best, trial, label, MAX_TRIES)):
            if not is_measured:
                return TrialComparison(failure=self._failures[trial])
            objection = self._objection(trial, original, *tried)
            if objection is not None:
                return TrialComparison(objection=objection)
            gain = self._gain(best, trial)
            hopeless = number > 0 and gain is not None and gain.value <= 1
            if hopeless or self._is_decided(gain):
                break
        return TrialComparison(gain=gain)

    def _alternate(self, best: Trial, other: Trial, label: str, runs: int) -> Iterator[bool]:
        """Run ``other`` up to so many times, and ``best`` between; yield whether it was measured."""
        for number in range(runs):
            if self.stop or not self._time_for(2 if number else 1):
                return
            if number or self._series.runs_since(best) >= MAX_RUNS_BETWEEN:
                self._measure(best)
            yield self._measure(other, label)

    def _is_gain(self, gain: Interval | None) -> bool:
        return gain is not None and is_gain(gain, MIN_GAIN)

    def _is_decided(self, gain: Interval | None) -> bool:
        """Return whether there is a gain, or none that the noise would not hide."""
        too_small = gain is not None and gain.high is not None and gain.high < self._threshold
        return too_small or self._is_gain(gain)

    def _replace_values(self, remedy: Remedy) -> None:
        """Take back another value of the same remedy."""
        for old in [one for one in self.kept if one.name == remedy.name]:
            self.kept.remove(old)
            self.tried = [
                dataclasses.replace(one, outcome="replaced", reason=f"by {remedy.label}")
                if one.remedy == old
                else one
                for one in self.tried
            ]

    def _try_pairs(self, original: Trial) -> None:
        """Try the two largest gains that were not kept together: they may help only both."""
        left = [
            one
            for one in self.tried
            if one.outcome == "no gain" and one.gain is not None and one.gain.value > 1
        ]
        left.sort(key=lambda one: -(one.gain.value if one.gain else 0.0))
        if len(left) < 2 or left[0].remedy.name == left[1].remedy.name:
            return
        first, second = left[0].remedy, left[1].remedy
        best = apply_all(self.kept, original)
        trial = apply_all((first, second), best)
        if self.stop or not self._time_for(4) or self.runner.refusal_reason(trial) is not None:
            return
        found = self._compare(
            best, trial, f"{first.label} with {second.label}", original, first, second
        )
        if self._is_gain(found.gain):
            self.kept += [first, second]
            self.tried = [one for one in self.tried if one not in left[:2]]
            self._note(first, "kept", gain=found.gain, reason=f"together with {second.label}")
            self._note(second, "kept", gain=found.gain, reason=f"together with {first.label}")

    def _prune(self, group: Sequence[Remedy], original: Trial) -> None:
        """Drop those of ``group`` without which training is as fast: all, or some of them."""
        others = [one for one in self.kept if one not in group]
        if self.stop or not group or len(self.kept) < 2 or not self._time_for(2):
            return
        if others:
            gain = self._gain_over(others, group, original)
            if gain is None:
                return
            if gain.value <= self._threshold:
                self.kept = others
                for one in group:
                    self._replace_note(one, "dropped", gain, "as fast without it beside the others")
                return
            if len(group) == 1:
                self._replace_note(group[0], "kept", gain)
                return
        self._prune_halves(group, original)

    def _prune_halves(self, group: Sequence[Remedy], original: Trial) -> None:
        middle = len(group) // 2
        for half in (group[middle:], group[:middle]):  # the likely ones come first
            self._prune([*half], original)

    def _gain_over(
        self, others: list[Remedy], group: Sequence[Remedy], original: Trial
    ) -> Interval | None:
        """Return the gain of ``group`` beside ``others``; None if they alone do not run."""
        final, without = apply_all(self.kept, original), apply_all(others, original)
        if not self._is_allowed(without):
            return None
        label = f"without {', '.join(one.label for one in group)}"
        gain = None
        for is_measured in self._alternate(final, without, label, 2):
            if not is_measured:
                break
            gain = self._gain(without, final)
            if self._is_decided(gain):
                break
        return gain

    def _replace_note(self, remedy: Remedy, outcome: str, gain: Interval, reason: str = "") -> None:
        self.tried = [one for one in self.tried if one.remedy != remedy]
        self._note(remedy, outcome, gain=gain, reason=reason)

    def _verify(self, original: Trial, profile: ScriptProfile | None) -> Verification:
        """Compare the original, the final settings and the edited copy in fresh runs."""
        final, series = apply_all(self.kept, original), RunSeries()
        batch = original.plan.batch or 1
        if not self.kept:
            return Verification(
                gain=None,
                original_ms=self._series.step_ms(original, batch),
                final_ms=None,
            )
        self.events.verifying(self.time_budget.remaining_s)
        arms: dict[str, tuple[Trial, WorkloadRunner]] = {
            "original": (original, self.runner),
            "final": (final, self._runner_of(final)),
        }
        copy = converted = self._converted.copy if self._converted is not None else None
        remedies = tuple(self._kept_after_conversion)
        if profile is not None and remedies:
            copy = self.edit_script(remedies, profile, converted or EditedCopy())
            if copy.sources:
                trial = apply_all(copy.at_run_time, self._base(original))
                with_copy = self.runner.with_converted if converted else self.runner.with_sources
                arms[COPY] = (trial, with_copy(copy.sources))
        gain: Interval | None = None
        failures: dict[str, str] = {}
        for number in range(MAX_VERIFYING_PAIRS):
            enough = number >= VERIFYING_PAIRS and gain is not None and is_precise(gain)
            late = len(arms) * self._typical_run_s > self.time_budget.remaining_s
            if self.stop or enough or (number >= LEAST_VERIFYING_PAIRS and late):
                break
            for name, (trial, runner) in [*arms.items()][:: 1 if number % 2 else -1]:
                key = COPY if name == COPY else trial
                found = self._run_once(trial, f"verifying: {name}", runner, key)
                if found is not None:
                    series.add(name, found)
                else:
                    failures[name] = self._failures[trial]
            gain = series.gain("original", "final", self._series.noise().merge(series.noise()))
        return Verification(
            gain=gain,
            original_ms=series.step_ms("original", batch),
            final_ms=series.step_ms("final", batch),
            objection=failures.get("final") or self._objection(final, original),
            pairs=series.count("final"),
            copy=copy,
            copy_objection=failures.get(COPY) or self._objection_to_copy(series, original),
        )

    def _objection_to_copy(self, series: RunSeries, original: Trial) -> str | None:
        """Return how the edited copy differs from the final settings, or None."""
        if not series.count(COPY):
            return None
        objection = self._objection(COPY, original)
        gain = series.gain("original", COPY, self._series.noise().merge(series.noise()))
        if objection is None and (gain is None or gain.low is None or gain.low <= 1):
            found = f"{gain.value:.2f} ×" if gain is not None else "not measured"
            objection = f"it is not faster than the original ({found})"
        return objection

    def _measure(self, trial: Trial, label: str = "the best so far") -> bool:
        """Run ``trial`` once more; return whether it was measured."""
        found = self._run_once(trial, label)
        if found is not None:
            self._series.add(trial, found)
        return found is not None

    def _run_once(
        self, trial: Trial, label: str, runner: WorkloadRunner | None = None, key: object = None
    ) -> float | None:
        """Return the milliseconds per sample of a fresh run, None if it failed.

        Its losses and samples are kept under ``key``, by default the trial.
        """
        measurement = self._run_fresh(trial, label, runner or self._runner_of(trial))
        if isinstance(measurement, str):
            self._failures[trial] = measurement
            return None
        if losses := first_losses(measurement):
            self._losses.setdefault(key or trial, []).append(losses)
        self._samples[key or trial] = sample_hash(measurement)
        metrics = trial.metrics(measurement)
        samples = trial.plan.batch or 1
        return (metrics["step"] + metrics.get("gap", 0.0)) / samples

    def _runner_of(self, trial: Trial) -> WorkloadRunner:
        """Return the runner of the converted script for trials with its strategy, else the usual."""
        if self._converted_runner is not None and trial.plan.strategy == CONVERTED_STRATEGY:
            return self._converted_runner
        return self.runner

    def _base(self, original: Trial) -> Trial:
        """Return what has the same samples in the same order as trials with remedies."""
        if self._converted_runner is None:
            return original
        return original.edit(strategy=CONVERTED_STRATEGY)

    def _run_fresh(self, trial: Trial, label: str, runner: WorkloadRunner) -> Measurement | str:
        """Return the measurement of a fresh run, or why it failed."""
        self.events.trying(label, self.time_budget.remaining_s)
        self._runs += 1
        before_s = self.time_budget.remaining_s
        # Compilation and searches are over before the steps that count.
        typical_s = self._typical_run_s
        spare_s = self.time_budget.remaining_s - self._verifying_runs * typical_s
        limit_s = max(LEAST_LIMIT_S, LIMIT_FACTOR * typical_s, min(LONGEST_LIMIT_S, spare_s))
        measurement = runner.measure(trial, FIRST_REPEAT + self._runs, limit_s)
        self._run_seconds.append(before_s - self.time_budget.remaining_s)
        return _failure(trial, measurement, self._author_caveats) or measurement

    def _gain(self, old: Trial, new: Trial) -> Interval | None:
        return self._series.gain(old, new, self._series.noise())

    @property
    def _threshold(self) -> float:
        noise = self._series.noise()
        if noise.degrees_of_freedom == 0:
            return MIN_GAIN
        return max(MIN_GAIN, math.exp(noise.deviation))

    def _objection(self, key: object, original: Trial, *tried: Remedy) -> str | None:
        """Return how a run trains another way than what is kept and tried in it allow, or None."""
        losses = self._losses.get(key)
        if not losses:
            return None
        remedies = (*self.kept, *tried)
        reference = LossReference(tuple(self._losses.get(self._base(original), ())))
        return reference.objection(
            losses[-1],
            largest_change(remedies),
            has_other_draws=self._has_other_draws(key, original, remedies),
        )

    def _has_other_draws(self, key: object, original: Trial, remedies: Collection[Remedy]) -> bool:
        """Return whether a run has the samples of the original, but other numbers drawn for them.

        A data set that augments its samples draws the numbers in the loader's workers.
        """
        samples = self._samples.get(key)
        usual = self._samples.get(self._base(original))
        is_same = samples is not None and samples == usual
        return is_same and any(one.has_other_draws for one in remedies)

    def _loss_summary(self, original: Trial) -> str:
        if self._converted is not None:
            return self._conversion_losses
        if not self._losses.get(original):
            return "losses were not compared: the script calls no backward on a loss"
        reference = LossReference(tuple(self._losses[original]))
        if not reference.is_repeatable:
            return "losses of two runs of the original differ: only their means were compared"
        final = apply_all(self.kept, original)
        losses = self._losses.get(final, [()])[-1]
        differs = reference.objection(losses, largest_change(self.kept)) is not None
        if differs and self._has_other_draws(final, original, self.kept):
            return (
                "the data set draws other random numbers in other loader workers: samples and "
                "mean losses compared"
            )
        return f"first {len(reference.runs[0])} losses compared"

    def _time_for(self, runs: int, *, extra_s: float = 0.0) -> bool:
        """Return whether so many runs fit before the time that verification needs."""
        needed_s = (runs + self._verifying_runs) * self._typical_run_s + extra_s
        return needed_s <= self.time_budget.remaining_s

    @property
    def _verifying_runs(self) -> int:
        """How many runs the verification needs at least."""
        # A conversion alone is its own edited copy.
        has_copy = not self._converted or self._kept_after_conversion
        arms = 3 if self.runner.workload.script and has_copy else 2
        return arms * LEAST_VERIFYING_PAIRS

    @property
    def _kept_after_conversion(self) -> list[Remedy]:
        return [one for one in self.kept if one.name != CONVERSION]

    @property
    def _typical_run_s(self) -> float:
        return median(self._run_seconds) if self._run_seconds else 0.0

    def _note(
        self, remedy: Remedy, outcome: str, *, gain: Interval | None = None, reason: str = ""
    ) -> None:
        tried = Tried(remedy=remedy, outcome=outcome, gain=gain, reason=reason)
        self.tried.append(tried)
        self.events.decided(tried)


def _failure(trial: Trial, measurement: Measurement, known: Collection[str]) -> str | None:
    """Return why a run does not count, or None. The original has the caveats ``known``."""
    if measurement.status != "ok":
        return failure_reason(measurement)
    kinds = set(TRAINING_KINDS).difference(known)
    wrong = next((one.text for one in measurement.warnings if one.kind in kinds), None)
    if wrong is not None:
        return f"wrong training: {wrong}"
    return None if "step" in trial.metrics(measurement) else "it ended before its timed steps"
