"""Choose the trials of an experiment: which, in what order, and how many steps each has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from nfold.core.interleave import schedule_slots
from nfold.core.plan import LONG_STEP_S, MIN_TIMED_STEPS, WARMUP_STEPS, Plan
from nfold.explain.attribution import FindingBuilder, break_even_trials, cause_pairs
from nfold.explain.cause_costs import Attribution
from nfold.explain.causes import CAUSES_BY_ID, Cause, applicable_causes
from nfold.explain.causes.cause import skipped_reason
from nfold.explain.causes.cost_model import one_device_trials_and_step
from nfold.explain.causes.epoch_boundary import EPOCH_BOUNDARY, endless_reason, short_epoch_trials
from nfold.explain.causes.input_pipeline import INPUT, real_input_trials
from nfold.explain.causes.launch_bound import device_busy_ms
from nfold.explain.design import (
    ExperimentDesign,
    Trial,
    one_allreduce,
    over_short_epochs,
    over_whole_epochs,
)
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.result.budget import SUSPECTED_LOSS_FRACTION, Finding
from nfold.explain.trials import TrialResults

# Fractions of a step.
MIN_INTERVAL_FRACTION = 0.01  # nothing is repeated once every interval is narrower
SLOWER_FIX_FRACTION = 0.2  # a fix that is slower than another by more is not measured again
PLANNING_RESAMPLES = 100

# Fraction of the time budget.
EPOCH_BUDGET_FRACTION = 0.1  # for trials over whole epochs

EpochSteps = Callable[[Plan], int | None]  # steps per epoch, None if unknown
CRASHED_PREFIX = "crashed: "


def required(design: ExperimentDesign) -> Iterator[Trial]:
    """Yield the trials of every cause that applies, those observed in the probe run first.

    ``epoch_boundary_trials`` returns the trials over epoch boundaries.
    """
    yield from observed_in_probe(design)
    yield from _trials_of_causes(design, applicable_causes(design))


def observed_in_probe(design: ExperimentDesign) -> Iterator[Trial]:
    """Yield the trials of causes that the probe run observed, or for which it found a repair."""
    causes = [
        cause
        for cause in applicable_causes(design)
        if cause.observed_in_probe(design) or cause.has_repair(design)
    ]
    return _trials_of_causes(design, causes)


def _trials_of_causes(design: ExperimentDesign, causes: Iterable[Cause]) -> Iterator[Trial]:
    for cause in causes:
        if skipped_reason(cause, design) is None:
            costs = cause.costs(design)
            own = (*costs.trials, *costs.refining_trials, *one_device_trials_and_step(costs))
            for trial in own:
                if trial.plan.steps is not None and trial.variant.batches_per_epoch is None:
                    yield trial


def dominant_fixes(design: ExperimentDesign, results: TrialResults) -> list[Trial]:
    """Return the fixes of causes that take more than half a step of one device.

    Every other cause takes less. On several devices, all other trials come first, except where
    input takes half of the step: replayed batches save it, or the probe run waited that long.
    """
    attribution = Attribution(design, results, PLANNING_RESAMPLES, final=False)
    if design.devices > 1:
        return _fixes_of_slow_input(design, attribution.view)
    half_ms = attribution.fit.value(attribution.achieved_ms) / 2
    return [
        trial
        for finding in FindingBuilder(attribution).one_device_findings()
        if finding.significant and finding.total_ms.value > half_ms
        for flag, trial in CAUSES_BY_ID[finding.cause].fixes(design).items()
        if flag
    ]


def waits_mostly_for_input(design: ExperimentDesign) -> bool:
    """Return whether the probe run waited for its data loader for more than half of a step."""
    return design.step_ms is not None and 2 * design.facts.input_wait_ms > design.step_ms


def _fixes_of_slow_input(design: ExperimentDesign, view: MetricView) -> list[Trial]:
    if skipped_reason(INPUT, design):
        return []
    real, replayed = one_allreduce(design), one_allreduce(design, "replayed")
    is_slow = waits_mostly_for_input(design)
    if view.has(real, replayed):
        is_slow = bool(view.step(real) > 2 * view.step(replayed))
    return list(INPUT.fixes(design).values()) if is_slow else []


def follow_ups(design: ExperimentDesign, results: TrialResults) -> list[Trial]:
    """Return the trials that the findings so far call for.

    Fixes of the largest losses come first, then pairs of causes removed together, then trials
    with the real input, then other batch sizes.
    """
    attribution = Attribution(design, results, PLANNING_RESAMPLES, final=False)
    builder, view = FindingBuilder(attribution), attribution.view
    findings = [*builder.multi_device_findings(), *builder.one_device_findings()]
    significant = [finding for finding in findings if finding.significant]
    step_ms = attribution.fit.value(attribution.achieved_ms)
    pursued = [*significant, *_suspected_findings(design, findings, significant, step_ms)]
    pursued.sort(key=lambda finding: -finding.total_ms.value)
    found: list[Trial] = []
    for cause in dict.fromkeys(finding.cause for finding in pursued):
        fixes = CAUSES_BY_ID[cause].fixes(design)
        measured = {t: float(view.step(t)) for flag, t in fixes.items() if flag and view.has(t)}
        limit_ms = min(measured.values(), default=0.0) + SLOWER_FIX_FRACTION * step_ms
        found += [t for t in fixes.values() if t not in measured or measured[t] < limit_ms]
    found += [trial for pair in cause_pairs(design, significant) for trial in pair.trials]
    if design.devices > 1 and any(finding.cause in ("input", "storage") for finding in pursued):
        found += real_input_trials(design)
    slower = attribution.speedup(view) < 1
    can_change_batch = design.profile is None or design.profile.accepts_batch_size
    if slower and not design.single_device_script and can_change_batch:
        found += break_even_trials(design)
    return list(dict.fromkeys(found))


def _suspected_findings(
    design: ExperimentDesign, findings: list[Finding], significant: list[Finding], step_ms: float
) -> list[Finding]:
    # Measuring a fix is worth more than a repeat of the same trial: it helps or it does not.
    large = [one for one in findings if one.lost_ms.value > SUSPECTED_LOSS_FRACTION * step_ms]
    large.sort(key=lambda finding: -finding.lost_ms.value)
    found = [] if significant else large[:1]
    if not any(CAUSES_BY_ID[finding.cause].fixes(design) for finding in significant):
        found += [one for one in large if CAUSES_BY_ID[one.cause].fixes(design)][:1]
    return found


def widest_interval(design: ExperimentDesign, results: TrialResults) -> list[Trial]:
    """Return the trials that narrow the widest interval; empty if all are narrow."""
    attribution = Attribution(design, results, PLANNING_RESAMPLES, final=False)
    builder = FindingBuilder(attribution)
    findings = (
        builder.multi_device_findings() if design.devices > 1 else builder.one_device_findings()
    )
    lost = {one.cause: one.lost_ms for one in findings}
    widths = {name: (ms.high or 0.0) - (ms.low or 0.0) for name, ms in lost.items()}
    least_ms = MIN_INTERVAL_FRACTION * attribution.fit.value(attribution.achieved_ms)
    if not widths or max(widths.values()) < least_ms:
        return []
    costs = attribution.costs[max(widths, key=lambda name: widths[name])]
    refining = (trial for trial in costs.refining_trials if trial in results.runs)
    own = costs.trials or one_device_trials_and_step(costs)
    return [design.actual(), design.baseline, *own, *refining]


def epoch_boundary_trials(
    design: ExperimentDesign, results: TrialResults, epoch_steps: EpochSteps, budget_s: float
) -> list[Trial]:
    """Return the trials over epoch boundaries that are still missing.

    They have short epochs where a script allows it, else whole epochs if these take little of the
    time budget. Otherwise ``results.reasons`` gets the reason.
    """
    if skipped_reason(EPOCH_BOUNDARY, design) or endless_reason(design):
        return []
    view = results.fit(PLANNING_RESAMPLES).view
    ends = dict.fromkeys((design.actual(), design.baseline))
    missing = [one for one in ends if not view.has_epoch_gap(one)]
    if short_epoch_trials(design):
        return list(map(over_short_epochs, missing))
    whole = list(map(over_whole_epochs, missing))
    reason = _too_long_reason(design, missing, view, epoch_steps, budget_s)
    if reason is None:
        return whole
    results.reasons |= dict.fromkeys(whole, reason)
    return []


def _too_long_reason(
    design: ExperimentDesign,
    trials: Iterable[Trial],
    view: MetricView,
    epoch_steps: EpochSteps,
    budget_s: float,
) -> str | None:
    needed_s = 0.0
    for trial in trials:
        plan = over_whole_epochs(trial).plan
        steps = design.facts.training_loader.steps_per_epoch(plan.batch) or epoch_steps(plan)
        if steps is None:
            return "the length of an epoch is unknown"
        if (plan.warmup_steps or 0) > ((plan.epochs or 1) - 1) * steps:
            return f"epochs of {steps} steps end within the warm-up"
        needed_s += (plan.epochs or 1) * steps * float(view.step(trial)) / 1e3
    if needed_s > EPOCH_BUDGET_FRACTION * budget_s:
        fixed = ", and the trainer reads their length ahead, so that none can be shortened"
        fixed *= design.facts.training_loader.length_read_ahead
        return f"whole epochs take {needed_s:.0f} s{fixed}; next: --budget {10 * needed_s:.0f}s"
    return None


def batch_size_trials(design: ExperimentDesign) -> tuple[Trial, ...]:
    """Return the trial that shows whether a script accepts smaller batches, if that is unknown.

    It uses one device, because replicas may fail for other reasons.
    """
    known = design.scaling_requested or design.scaling == "weak"
    return () if known or not design.is_one_process_script else (design.one_device("real"),)


def with_original_batch(
    design: ExperimentDesign, results: TrialResults, interleaved_failures: Mapping[Trial, str]
) -> ExperimentDesign | None:
    """Return the design with weak scaling if the script fails with smaller batches, else None.

    Many scripts repeat the batch size where they reshape a tensor or create a state. Applies only
    if the user did not choose the scaling. ``interleaved_failures`` are the reasons of trials that
    failed first in their process tree.
    """
    if not batch_size_trials(design) or any(
        _has_smaller_batch(design, trial) for trial in results.runs
    ):
        return None
    errors = (
        reason.removeprefix(CRASHED_PREFIX)
        for trial, reason in {**interleaved_failures, **results.reasons}.items()
        if trial.plan.devices == 1
        and _has_smaller_batch(design, trial)
        and reason.startswith(CRASHED_PREFIX)
    )
    error = next(errors, None)
    if error is None:
        return None
    return dataclasses.replace(
        design,
        plan=design.plan.edit(batch=(design.plan.batch or 1) * design.devices),
        scaling="weak",
        profile=dataclasses.replace(design.facts, fixed_batch_error=error),
    )


def _has_smaller_batch(design: ExperimentDesign, trial: Trial) -> bool:
    processes = trial.plan.devices or 1 if trial.plan.strategy == "ddp" else 1
    return (trial.plan.batch or 0) // processes < (design.plan.batch or 1)


# The number of steps of a trial, from the step time. It is the same for every time budget, so that
# an explanation with a larger budget finds the trials of an earlier one.

MIN_STEPS, MAX_STEPS = 20, 2000
TIMED_S = 2.0  # about as long as a trial takes to start
# On a CPU, every other process of the host is part of a step. In a script with shorter epochs an
# interleaved trial lasts at least TIMED_S, because an epoch begins with a wait for its first batch.
TIMED_INTERLEAVED_S = {"cuda": 1.0, "cpu": 3.0}
TIMED_OPERATION_S = 0.5  # per part of an operation, which has about ten
MAX_WARMUP_S = 5.0  # also of the steps in which loader queues settle in a slot
# A script with several optimizers shows only after more steps which of them steps least often.
MIN_WARMUP_STEPS, MIN_WARMUP_SEVERAL_OPTIMIZERS = 3, 7
ROUND_FACTORS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)


def with_run_length(
    design: ExperimentDesign, step_s: float, *, interleaved: bool
) -> ExperimentDesign:
    """Return the design with round numbers of timed steps and warm-up steps."""
    step_s = max(1e-6, step_s)
    timed_s = _timed_s(design, step_s) if interleaved else TIMED_S
    timed_s = TIMED_OPERATION_S if design.is_operation else timed_s
    least = min(MIN_STEPS, max(MIN_TIMED_STEPS, round_up(MIN_STEPS * LONG_STEP_S / step_s)))
    plan = design.plan.edit(
        steps=min(MAX_STEPS, max(least, round_up(timed_s / step_s))),
        epochs=None,
        warmup_steps=_warmup_steps(design, round_up(MAX_WARMUP_S / step_s)),
    )
    return dataclasses.replace(design, plan=plan)


def _timed_s(design: ExperimentDesign, step_s: float) -> float:
    timed_s = TIMED_INTERLEAVED_S[str(design.plan.device)]
    batches = design.facts.training_loader.batches_per_epoch
    if batches is None or batches / design.plan.accumulate * step_s > timed_s:
        return timed_s
    return max(timed_s, TIMED_S)


def _warmup_steps(design: ExperimentDesign, affordable: int) -> int:
    planned, least = design.plan.warmup_steps or WARMUP_STEPS, WARMUP_STEPS
    if design.profile is not None:
        several = len(design.profile.optimizers) > 1
        fewest = MIN_WARMUP_SEVERAL_OPTIMIZERS if several else MIN_WARMUP_STEPS
        queued = max(0, planned - WARMUP_STEPS)
        least = min(least, max(fewest, affordable) + queued)
    return min(planned, max(least, affordable))


def run_seconds(design: ExperimentDesign, step_s: float) -> float:
    """Estimate the seconds of all steps of a trial; ``step_s`` is the actual step."""
    return step_s * ((design.plan.warmup_steps or 0) + (design.plan.steps or 0))


def interleaved_seconds(design: ExperimentDesign, trials: Sequence[Trial], step_s: float) -> float:
    """Estimate the seconds that the interleaved trials take; ``step_s`` is the actual step.

    Replayed batches save the wait for input that the probe run observed.
    """
    busy_s = (device_busy_ms(design) or 0.0) / 1e3
    replayed_s = max(step_s - design.facts.input_wait_ms / 1e3, busy_s)
    variants, seconds, slot_step_s = [trial.variant for trial in trials], 0.0, step_s
    for slot in reversed(schedule_slots(variants, trials[0].plan)):
        # Steps in which a change takes effect are like those after it.
        if slot.variant_index is not None:
            real = variants[slot.variant_index].input == "real"
            slot_step_s = step_s if real else replayed_s
        seconds += slot.steps * slot_step_s
    return seconds


def round_up(steps: float) -> int:
    """Return the next of 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, ... from ``steps`` on."""
    size = 1
    while True:
        for factor in ROUND_FACTORS:
            if (found := math.ceil(factor * size)) >= steps:
                return found
        size *= 10
