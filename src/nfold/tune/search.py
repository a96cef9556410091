"""The search of ``nfold tune``: explain, try remedies, keep what wins, verify in fresh runs.

Every try is a run in a fresh process tree, in a pair with one of the best settings so far. A
remedy is kept if its gain is above 1 %, with an interval that allows for the number of remedies. It
is given up if it gains less than the noise between runs of equal settings, or is not clearly faster
after a few. If there is no time to try all of them alone, the one from which the explanation expects
most is tried first, then those that work on the input, the computation and the communication, each
group together. Kept ones are dropped again if training is as fast without them. The final gain comes
from runs that took no part in choosing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from nfold.core.errors import RunFailure
from nfold.core.format import pluralize
from nfold.core.plan import WARMUP_STEPS, Plan, prefetched_batches
from nfold.core.script_profile import ScriptProfile
from nfold.core.stats import Interval
from nfold.explain.attribution import build_budget
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.experiment import Experiment
from nfold.explain.result.budget import Budget
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import WorkloadRunner
from nfold.launch.launch_spec import StopRequest
from nfold.tune.conversion.conversion_check import run_check
from nfold.tune.plan_fields import EXCLUDED_WITH_RUN
from nfold.tune.remedies import (
    CONVERSION,
    PROMISING,
    PlanCompletion,
    Remedy,
    apply_all,
    choose_remedies,
    conversion_to,
    groups_to_try,
    values_to_try,
)
from nfold.tune.result import ConvertedScript, EditedCopy, Tried, TuneResult, Verification
from nfold.tune.runs.fresh_runs import MIN_GAIN, NOISE_LABEL, FreshRuns, TuneEvents
from nfold.tune.runs.loss_record import LossRecord
from nfold.tune.runs.pair_series import is_gain
from nfold.tune.runs.verification import LEAST_PAIRS, FinalComparison, pairs_to_confirm

SEED = 1
RUN_S = 4.0  # of timed steps in a run: runs differ more than the steps of one
MIN_STEPS, MAX_STEPS, MAX_WARM_UP = 20, 400, 40
EXPLAIN_FRACTION, AGAIN_FRACTION, VERIFY_FRACTION = 0.3, 0.15, 0.2  # of the time budget, at most
EXPLAIN_ROUNDS = 2  # of trials: to order the remedies, wide intervals suffice
USUAL_TRIES, MAX_TRIES = 4, 8  # pairs of one remedy; more than usual if it seems to gain
PAIRS_PER_REMEDY = 3  # with less time, remedies are first tried together

ExplainStep = Callable[[WorkloadRunner, float], tuple[ExperimentDesign, Experiment]]
"""Explains within so many seconds; the runner applies the remedies that are kept."""
EditScript = Callable[[tuple[Remedy, ...], ScriptProfile, EditedCopy], EditedCopy]
"""Writes an edited copy of a script with the remedies that are kept, as far as edits keep them.

The last argument has the edits that the copy has besides, those of a conversion.
"""
ConvertScript = Callable[[ScriptProfile], ConvertedScript]
"""Writes copies of a script that nfold.Run makes data-parallel."""


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
    _runs: FreshRuns = field(init=False)
    _without_gain: list[tuple[list[Remedy], Interval]] = field(default_factory=list)
    _converted: ConvertedScript | None = None
    _conversion_losses: str = ""

    def run(self) -> TuneResult:
        """Return what was kept and what was tried. Raises RunFailure if the original does not run.

        After a request to stop, the best settings so far are the result, if they were verified.
        """
        design, budget = self._explained(EXPLAIN_FRACTION)
        if budget.training_errors:
            error = budget.training_errors[0]
            hint = "" if "next: " in error else "; next: correct it, then nfold tune again"
            raise RunFailure(f"wrong training: {error}{hint}")
        runs = self._runs = FreshRuns(
            self.runner,
            self.time_budget,
            self.events,
            original=self._original(design, budget.n_devices.step_ms.value / 1e3),
            reserved_s=lambda: self._verifying_s,
            author_caveats=frozenset(caveat.kind for caveat in design.probe_caveats),
            losses=LossRecord(draws_random_numbers=design.facts.draws_random_numbers),
            alternates=bool(self.runner.workload.script),
        )
        if (failure := runs.measure(runs.original, runs.original, NOISE_LABEL)) is not None:
            raise RunFailure(f"the original cannot be run: {failure}")
        self._convert(design)
        left = self._search(design, budget)
        self._try_pairs()
        self._prune(self._kept_after_conversion)
        verification = self._verify(design.profile)
        return TuneResult(
            target=str(self.runner.workload),
            devices=design.devices,
            original=runs.original,
            final=self._best,
            kept=tuple(self.kept),
            tried=tuple(self.tried),
            verification=verification,
            losses=self._conversion_losses
            or runs.losses.summary(runs.original, self._best, self.kept),
            budget=budget,
            final_budget=left if self.kept else budget,
            profile=design.profile,
            stopped=bool(self.stop),
            sufficient_s=self._sufficient_s,
        )

    @property
    def _best(self) -> Trial:
        """The trial with all remedies that are kept."""
        return apply_all(self.kept, self._runs.original)

    @property
    def _sufficient_s(self) -> float:
        """A time budget that would also have tried each remedy for which there was no time."""
        untried = sum(one.lacked_time for one in self.tried)
        pairs = self._runs.pair_count + PAIRS_PER_REMEDY * untried
        seconds = pairs * self._runs.typical_s + self._verifying_s
        return seconds / (1 - EXPLAIN_FRACTION - AGAIN_FRACTION)

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

    def _convert(self, design: ExperimentDesign) -> None:
        """Try a script of one process with nfold.Run on all devices."""
        if design.profile is None or not design.uses_one_process:
            return
        runs = self._runs
        found, remedy = self.convert_script(design.profile), conversion_to(design)
        trial = remedy.apply(runs.original)
        if found.obstacle:
            self._note(remedy, "refused", reason=found.obstacle)
            return
        if self.stop or not self._time_for(3):
            self._note_without_time(remedy)
            return
        check = run_check(found, self.runner, runs.original, trial, runs.run)
        if isinstance(check, str):
            self._note(remedy, "failed", reason=check)
            return
        objection = check.objection()
        if objection is not None:
            self._note(remedy, "changes training", reason=objection)
            return
        runs.converted_runner = self.runner.with_converted(found.copy.sources)
        self._decide(remedy, trial)
        if remedy in self.kept:
            self._converted, self._conversion_losses = found, check.summary
        else:
            runs.converted_runner = None

    def _search(self, design: ExperimentDesign, budget: Budget) -> Budget | None:
        """Try all remedies; after the first round explain again what is left, and return that.

        On a converted script those are tried that nfold.Run does not choose by itself.
        """
        refusal = self.runner.refusal_reason
        remedies = choose_remedies(design, budget, self.cores, self.allowed, refusal)
        if self._converted is not None:
            # nfold.Run takes rows of tensors itself, without a DataLoader.
            unused = design.facts.training_loader.stacks_tensors
            remedies = [
                one
                for one in remedies
                if one.name not in EXCLUDED_WITH_RUN
                and not one.is_in_source_only
                and not (unused and one.sets_loader)
            ]
        remedies = self._with_edits(remedies, design)
        if not self._time_for(PAIRS_PER_REMEDY * len(remedies)):
            self._try_all([one for one in remedies[:1] if one.is_promising])
            decided = {one.remedy.name for one in self.tried}
            others = [one for one in remedies if one.name not in decided]
            for group in groups_to_try(others):
                self._try_together(group)
        self._try_all(remedies)
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
        original = self._runs.original
        new = [one for one in new if one.apply(original) != original]
        self._try_all(self._with_edits(new, later))
        return left

    def _with_edits(self, remedies: list[Remedy], design: ExperimentDesign) -> list[Remedy]:
        """Return the remedies without those that only edits keep and that no edit of this script can."""
        found = []
        for one in remedies:
            if one.is_in_source_only and design.profile is not None:
                copy = self.edit_script((one,), design.profile, EditedCopy())
                if one in copy.at_run_time:
                    reason = "".join(copy.notes[:1]).removeprefix(f"{one.label}: ")
                    self._note(one, "refused", reason=reason)
                    continue
            found.append(one)
        return found

    def _runner_with_kept(self) -> WorkloadRunner:
        fields = {k: v for r in self.kept if r.is_plan_field for k, v in r.fields.items()}
        kept = apply_all(self.kept, Trial(plan=Plan()))
        return self.runner.with_remedies(fields, kept.variant)

    def _try_together(self, remedies: Sequence[Remedy]) -> None:
        """Keep all of ``remedies`` if they help together, and drop those that are not needed.

        If they fail or change the training, each half is tried. What is not kept can still be tried
        alone.
        """
        trial = self._best
        group: list[Remedy] = []
        for one in remedies:
            complete = self._complete(one, trial, [*self.kept, *group])
            if self._is_allowed(complete.apply(trial)):
                group.append(complete)
                trial = complete.apply(trial)
        if not group or self.stop or not self._time_for(2):
            return
        if len(group) == 1:
            self._decide(group[0], trial)
            return
        found = self._compare(trial, f"{len(group)} remedies together", *group)
        if found.failure or found.objection:
            self._try_parts(group, found.failure)
        elif self._is_gain(found.gain):
            self.kept += group
            for one in group:
                self._note(one, "kept", gain=found.gain, reason=_together(group))
            self._prune_halves(group)
        elif found.gain is not None:
            self._without_gain.append((group, found.gain))

    def _try_parts(self, group: list[Remedy], failure: str) -> None:
        """Try those that ``failure`` does not name, or each half if it names none."""
        named = [one for one in group if f"{one.name}: " in failure]
        for one in named:
            self._note(one, "refused", reason=failure)
        middle = 0 if named else len(group) // 2
        for part in (group[:middle], group[middle:]):
            self._try_together([one for one in part if one not in named])

    def _complete(self, remedy: Remedy, trial: Trial, kept: Collection[Remedy]) -> Remedy:
        """Return the remedy with the fields of the plan that it needs, if there are such."""
        if not remedy.is_plan_field:
            return remedy
        completion = PlanCompletion(self.cores, self.allowed, self.runner.refusal_reason)
        return completion.complete(remedy, trial, kept) or remedy

    def _is_allowed(self, trial: Trial) -> bool:
        return self.runner.refusal_reason(trial) is None

    def _try_all(self, remedies: list[Remedy]) -> None:
        """Try each remedy on top of those that are kept, and decide."""
        left = [*remedies]
        while left:
            best = self._best
            remedy = self._complete(left.pop(0), best, self.kept)
            trial = remedy.apply(best)
            if trial == best or any(one.remedy == remedy for one in self.tried):
                continue
            refusal = self.runner.refusal_reason(trial)
            if refusal is not None:
                self._note(remedy, "refused", reason=refusal)
            elif self.stop or not self._time_for(1):
                self._note_without_time(remedy)
            else:
                self._decide(remedy, trial)
                further = remedy.further(self.cores, self._runs.original.plan)
                if remedy in self.kept and further is not None and further not in left:
                    left.insert(0, further)

    def _decide(self, remedy: Remedy, trial: Trial) -> None:
        """Keep the remedy if it is faster and trains the same."""
        found = self._compare(trial, remedy.label, remedy)
        if found.failure:
            self._note(remedy, "failed", reason=found.failure)
        elif found.objection:
            self._note(remedy, "changes training", reason=found.objection)
        elif self._is_gain(found.gain):
            self._replace_values(remedy)
            # If it replaced another value, its gain is over the settings without either.
            gain = self._runs.gain(self._best, trial) or found.gain
            self.kept.append(remedy)
            self._note(remedy, "kept", gain=gain)
        else:
            self._note(remedy, "no gain", gain=found.gain)

    def _compare(self, trial: Trial, label: str, *tried: Remedy) -> TrialComparison:
        """Run ``trial``, which has ``tried``, and the best so far until their gain is decided."""
        runs, best, gain = self._runs, self._best, None
        for number, failure in enumerate(self._run_pairs(trial, label, MAX_TRIES)):
            if failure is not None:
                return TrialComparison(failure=failure)
            objection = runs.objection(trial, (*self.kept, *tried))
            if objection is not None:
                return TrialComparison(objection=objection)
            gain = runs.gain(best, trial)
            if gain is not None and (
                self._is_decided(gain) or _seems_useless(gain, tries=number + 1)
            ):
                break
        return TrialComparison(gain=gain)

    def _run_pairs(self, trial: Trial, label: str, most: int) -> Iterator[str | None]:
        """Run the best so far and ``trial`` while there is time; yield why a pair failed, or None."""
        for _ in range(most):
            if self.stop or not self._time_for(1):
                return
            yield self._runs.measure(self._best, trial, label)

    def _is_gain(self, gain: Interval | None) -> bool:
        return gain is not None and is_gain(gain, MIN_GAIN)

    def _is_decided(self, gain: Interval | None) -> bool:
        """Return whether there is a gain, or none that the noise would not hide."""
        too_small = gain is not None and gain.high is not None and gain.high < self._runs.threshold
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

    def _try_pairs(self) -> None:
        """Try the two largest gains that were not kept together: they may help only both."""
        left = [
            one
            for one in self.tried
            if one.outcome == "no gain" and one.gain and one.gain.value > 1 and not one.lacked_time
        ]
        left.sort(key=lambda one: -(one.gain.value if one.gain else 0.0))
        if len(left) < 2 or left[0].remedy.name == left[1].remedy.name:
            return
        first, second = left[0].remedy, left[1].remedy
        trial = apply_all((first, second), self._best)
        if self.stop or not self._time_for(2) or not self._is_allowed(trial):
            return
        found = self._compare(trial, f"{first.label} with {second.label}", first, second)
        if self._is_gain(found.gain):
            self.kept += [first, second]
            self.tried = [one for one in self.tried if one not in left[:2]]
            self._note(first, "kept", gain=found.gain, reason=f"together with {second.label}")
            self._note(second, "kept", gain=found.gain, reason=f"together with {first.label}")

    def _prune(self, group: Sequence[Remedy]) -> None:
        """Drop those of ``group`` without which training is as fast: all, or some of them."""
        others = [one for one in self.kept if one not in group]
        if self.stop or not group or len(self.kept) < 2 or not self._time_for(1):
            return
        if others:
            gain = self._gain_over(others, group)
            if gain is None:
                return
            if gain.value <= self._runs.threshold:
                self.kept = others
                for one in group:
                    self._replace_note(one, "dropped", gain, "as fast without it beside the others")
                return
            if len(group) == 1:
                self._replace_note(group[0], "kept", gain)
                return
        self._prune_halves(group)

    def _prune_halves(self, group: Sequence[Remedy]) -> None:
        middle = len(group) // 2
        for half in (group[middle:], group[:middle]):  # the likely ones come first
            self._prune([*half])

    def _gain_over(self, others: list[Remedy], group: Sequence[Remedy]) -> Interval | None:
        """Return the gain of ``group`` beside ``others``; None if they alone do not run."""
        runs, final = self._runs, self._best
        without = apply_all(others, runs.original)
        if not self._is_allowed(without):
            return None
        label = f"without {', '.join(one.label for one in group)}"
        gain = None
        for failure in self._run_pairs(without, label, 2):
            if failure is not None:
                break
            gain = runs.gain(without, final)
            if self._is_decided(gain):
                break
        return gain

    def _replace_note(self, remedy: Remedy, outcome: str, gain: Interval, reason: str = "") -> None:
        self.tried = [one for one in self.tried if one.remedy != remedy]
        self._note(remedy, outcome, gain=gain, reason=reason)

    def _verify(self, profile: ScriptProfile | None) -> Verification:
        """Compare the original, the final settings and the edited copy in fresh runs."""
        runs, remedies = self._runs, tuple(self._kept_after_conversion)
        if not self.kept:
            original_ms = runs.series.step_ms(runs.original, runs.original.plan.batch or 1)
            return Verification(gain=None, original_ms=original_ms, final_ms=None)
        self.events.verifying(self.time_budget.remaining_s)
        copy = converted = self._converted.copy if self._converted is not None else None
        copy_runner = None
        if profile is not None and remedies:
            copy = self.edit_script(remedies, profile, converted or EditedCopy())
            if copy.sources:
                with_copy = self.runner.with_converted if converted else self.runner.with_sources
                copy_runner = with_copy(copy.sources)
        return FinalComparison(runs, self.kept, self.stop, copy, copy_runner).verify()

    def _time_for(self, count: int, *, extra_s: float = 0.0) -> bool:
        """Return whether so many pairs fit before the time that verification needs."""
        pair_s = max(self._runs.typical_s, self._runs.seconds_of(self._best))
        return count * pair_s + extra_s + self._verifying_s <= self.time_budget.remaining_s

    @property
    def _verifying_s(self) -> float:
        """Seconds that the verification needs: for two pairs, or as many as confirm what is kept."""
        runs = self._runs
        gain = runs.gain(runs.original, self._best) if self.kept else None
        pair_s = runs.seconds_of(self._best)
        usual_s = pairs_to_confirm(gain, runs.series.noise()) * pair_s
        return max(LEAST_PAIRS * pair_s, min(usual_s, VERIFY_FRACTION * self.time_budget.budget_s))

    @property
    def _kept_after_conversion(self) -> list[Remedy]:
        return [one for one in self.kept if one.name != CONVERSION]

    def _note(
        self,
        remedy: Remedy,
        outcome: str,
        *,
        gain: Interval | None = None,
        reason: str = "",
        lacked_time: bool = False,
    ) -> None:
        tried = Tried(
            remedy=remedy, outcome=outcome, gain=gain, reason=reason, lacked_time=lacked_time
        )
        self.tried.append(tried)
        self.events.decided(tried)

    def _note_without_time(self, remedy: Remedy) -> None:
        """Note what there is no time to try alone, with the gain of its group if that was tried."""
        reason = "no time was left"
        for group, gain in self._without_gain:
            if remedy in group:
                reason = f"{_together(group)}; {reason} to try it alone"
                self._note(remedy, "no gain", gain=gain, reason=reason, lacked_time=True)
                return
        self._note(remedy, "not tried", reason=reason, lacked_time=True)


def _together(group: Sequence[Remedy]) -> str:
    return f"together with {pluralize(len(group) - 1, 'other')}"


def _seems_useless(gain: Interval, tries: int) -> bool:
    """Return whether to give up a remedy of an uncertain ``gain`` after so many tries."""
    is_clear = gain.low is not None and gain.low > MIN_GAIN
    if tries >= USUAL_TRIES:
        return not is_clear and gain.value < PROMISING
    return tries > 1 and gain.value <= 1
