"""Which rungs are asked for: by the causes that a plan can have, and by what was found so far."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from nfold.core.interleave import schedule_slots
from nfold.core.plan import LONG_STEP_S, MIN_TIMED_STEPS, WARMUP_STEPS, Plan
from nfold.explain import attribution
from nfold.explain.advice import pytorch
from nfold.explain.attribution import Attribution, FindingBuilder, cause_pairs
from nfold.explain.causes import CAUSES_BY_ID, Cause, applicable_causes
from nfold.explain.causes.epoch_boundary import EpochBoundaryCause
from nfold.explain.causes.input_pipeline import real_input_trials
from nfold.explain.causes.launch_bound import device_busy_ms
from nfold.explain.design import ExperimentDesign, Trial, over_short_epochs, over_whole_epochs
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.result.budget import Finding
from nfold.explain.trials import TrialResults

MIN_INTERVAL_FRACTION = 0.01
"""Of a step: once every interval is as narrow, nothing is repeated."""
PLANNING_RESAMPLES = 100
"""Resamples while the experiment goes on: its choices need no more."""
SLOWER_FIX_FRACTION = 0.2
"""Of a step: a fix with which one takes so much longer than with another is not measured again."""
SUSPECTED_LOSS_FRACTION = 0.1
"""Of a step: what seems to cost as much is worth its fixes, however wide its interval."""


def required(design: ExperimentDesign) -> Iterator[Trial]:
    """The rungs of every cause that the plan can have, of those first that have been seen.

    Ends of epochs are asked for apart.
    """
    yield from observed_in_probe(design)
    for cause in applicable_causes(design):
        yield from _trials_of_cause(design, cause)


def observed_in_probe(design: ExperimentDesign) -> Iterator[Trial]:
    """The rungs of causes that have been seen to happen."""
    for cause in applicable_causes(design):
        if cause.observed_in_probe(design):
            yield from _trials_of_cause(design, cause)


def _trials_of_cause(design: ExperimentDesign, cause: Cause) -> Iterator[Trial]:
    if cause.skipped_reason(design) is None:
        own = (*cause.multi_device_trials(design), *cause.refining_trials(design))
        for rung in (*own, *cause.one_device_evidence(design)):
            if rung.plan.steps is not None and rung.variant.batches_per_epoch is None:
                yield rung


def dominant_fixes(design: ExperimentDesign, results: TrialResults) -> list[Trial]:
    """Of one device: the fixes of what takes more than half of a step.

    What is left to ask about can take less. N devices have the rest of their ladder first.
    """
    if design.devices > 1:
        return []
    account = Attribution(design, results, PLANNING_RESAMPLES, final=False)
    half_ms = account.achieved_ms(account.fit.view) / 2
    rows = [
        row
        for row in FindingBuilder(account).one_device_findings()
        if row.significant and row.total_ms.value > half_ms
    ]
    return [
        rung for row in rows for flag, rung in CAUSES_BY_ID[row.cause].fixes(design).items() if flag
    ]


def follow_ups(design: ExperimentDesign, results: TrialResults) -> list[Trial]:
    """What the rows so far ask for: fixes first, causes taken away together, other batches.

    Fixes of what costs most come first: time may be over soon.
    """
    account = Attribution(design, results, PLANNING_RESAMPLES, final=False)
    made = FindingBuilder(account)
    rows = [*made.multi_device_findings(), *made.one_device_findings()]
    named = [row for row in rows if row.significant]
    step_ms = account.achieved_ms(account.fit.view)
    asking = [*named, *_suspected_findings(design, rows, named, step_ms)]
    found: list[Trial] = []
    asking.sort(key=lambda row: -row.total_ms.value)
    for cause in dict.fromkeys(row.cause for row in asking):
        found += _promising_fixes(
            CAUSES_BY_ID[cause].fixes(design), account.fit.view, SLOWER_FIX_FRACTION * step_ms
        )
    found += [rung for pair in cause_pairs(design, named) for rung in pair.trials]
    if design.devices > 1 and any(row.cause in ("input", "storage") for row in asking):
        found += real_input_trials(design)
    if (
        account.speedup(account.fit.view) < 1
        and not design.single_device_script
        and design.can_change_batch
    ):
        found += attribution.break_even_trials(design)
    return list(dict.fromkeys(found))


def _promising_fixes(fixes: Mapping[str, Trial], view: MetricView, worse_ms: float) -> list[Trial]:
    known = [view.step(rung) for flag, rung in fixes.items() if flag and view.has(rung)]
    most = min(known, default=0.0) + worse_ms
    return [
        rung
        for flag, rung in fixes.items()
        if not (flag and view.has(rung)) or view.step(rung) < most
    ]


def _suspected_findings(
    design: ExperimentDesign, rows: list[Finding], significant: list[Finding], step_ms: float
) -> list[Finding]:
    """Where nothing is named: the row that seems to cost most of those that cost much.

    Where nothing that is named has fixes to measure, the one of them that has: a fix says more
    than the same rung again, either it helps or it does not.
    """
    much = [row for row in rows if row.lost_ms.value > SUSPECTED_LOSS_FRACTION * step_ms]
    much.sort(key=lambda row: -row.lost_ms.value)
    found = [] if significant else much[:1]
    if not any(CAUSES_BY_ID[row.cause].fixes(design) for row in significant):
        found += [row for row in much if CAUSES_BY_ID[row.cause].fixes(design)][:1]
    return found


def widest_interval(design: ExperimentDesign, results: TrialResults) -> list[Trial]:
    """What makes the widest row narrower; empty where all are narrow."""
    account = Attribution(design, results, PLANNING_RESAMPLES, final=False)
    made = FindingBuilder(account)
    rows = made.multi_device_findings() if design.devices > 1 else made.one_device_findings()
    widest = max(rows, key=_interval_width, default=None)
    if widest is None or _interval_width(widest) < MIN_INTERVAL_FRACTION * account.achieved_ms(
        account.fit.view
    ):
        return []
    cause = CAUSES_BY_ID[widest.cause]
    told = (rung for rung in cause.refining_trials(design) if results.count_rounds(rung))
    own = cause.multi_device_trials(design) or cause.one_device_evidence(design)
    return [design.actual(), design.baseline, *own, *told]


def _interval_width(row: Finding) -> float:
    assert row.lost_ms.low is not None
    assert row.lost_ms.high is not None
    return row.lost_ms.high - row.lost_ms.low


EPOCH_BUDGET_FRACTION = 0.1
"""The part of the time budget that whole epochs may take."""
EpochSteps = Callable[[Plan], int | None]
"""Of an epoch under a plan, None where nobody knows."""


def epoch_boundary_trials(
    design: ExperimentDesign, results: TrialResults, epoch_steps: EpochSteps, budget_s: float
) -> list[Trial]:
    """Runs in which epochs end, for those ends of the ladder that have had none.

    Of passes that are cut short, where they can be; else whole epochs, if they are known to be
    short; if not, ``measured`` has the reason.
    """
    cause = EpochBoundaryCause()
    if cause.skipped_reason(design) or cause.endless_reason(design):
        return []
    view = results.fit(PLANNING_RESAMPLES).view
    missing = [rung for rung in dict.fromkeys(cause.trials(design)) if not view.has_epoch_gap(rung)]
    if cause.short_epoch_trials(design):
        return list(map(over_short_epochs, missing))
    reason = _too_long_reason(design, missing, view, epoch_steps, budget_s)
    if reason is not None:
        results.reasons |= dict.fromkeys(map(over_whole_epochs, missing), reason)
        return []
    return list(map(over_whole_epochs, missing))


def _too_long_reason(
    design: ExperimentDesign,
    trials: Iterable[Trial],
    view: MetricView,
    epoch_steps: EpochSteps,
    budget_s: float,
) -> str | None:
    taken_s = 0.0
    for rung in trials:
        plan = over_whole_epochs(rung).plan
        steps = design.epoch_steps(plan) or epoch_steps(plan)
        if steps is None:
            return "how long an epoch is is not known"
        if (plan.warmup_steps or 0) > ((plan.epochs or 1) - 1) * steps:
            return f"epochs of {steps} steps are over in the warm-up"
        taken_s += (plan.epochs or 1) * steps * view.step(rung) / 1e3
    if taken_s > EPOCH_BUDGET_FRACTION * budget_s:
        counted = EpochBoundaryCause().length_is_fixed(design)
        ahead = ", and what trains counts their batches ahead" * counted
        return f"whole epochs take {taken_s:.0f} s{ahead}; next: --budget {10 * taken_s:.0f}s"
    return None


CRASHED_PREFIX = "crashed: "


def batch_size_trials(design: ExperimentDesign) -> tuple[Trial, ...]:
    """The run that tells whether a script can have smaller batches, where that is not known.

    One device alone: copies may fail for other reasons.
    """
    if (
        design.profile is None
        or design.scaling_requested
        or design.scaling == "weak"
        or not design.uses_one_process
    ):
        return ()
    return (design.one_device("real"),)


def with_original_batch(
    design: ExperimentDesign, results: TrialResults, interleaved_failures: Mapping[Trial, str]
) -> ExperimentDesign | None:
    """The ladder on which each device has a batch of the script's own; None where it is not needed.

    Many scripts write the size of a batch down once more where they reshape one, or make a state.
    The work of one process is divided by smaller batches, unless a person has asked for that.
    ``together`` is why others failed that were the first to have a turn in a run.
    """
    if not batch_size_trials(design) or any(
        _has_smaller_batch(design, rung) for rung in results.runs
    ):
        return None
    assert design.profile is not None
    reasons = {**interleaved_failures, **results.reasons}.items()
    failed = (
        one for rung, one in reasons if rung.plan.devices == 1 and _has_smaller_batch(design, rung)
    )
    why = next(
        (one.removeprefix(CRASHED_PREFIX) for one in failed if one.startswith(CRASHED_PREFIX)), None
    )
    if why is None:
        return None
    return dataclasses.replace(
        design,
        plan=design.plan.edit(batch=(design.plan.batch or 1) * design.devices),
        scaling="weak",
        profile=dataclasses.replace(design.profile, fixed_batch_error=why),
        trial_cache={},
    )


def _has_smaller_batch(design: ExperimentDesign, trial: Trial) -> bool:
    processes = trial.plan.devices or 1 if trial.plan.strategy == "ddp" else 1
    return (trial.plan.batch or 0) // processes < (design.plan.batch or 1)


# How long runs are, by how long their steps take. Pure functions.
#
# The same for every time budget, so that with a larger one the earlier runs are found.

MIN_STEPS, MAX_STEPS = 20, 2000
TIMED_S = 2.0
"""What a run is to time of a rung: about as long as it takes to start one."""
TIMED_INTERLEAVED_S = {"cuda": 1.0, "cpu": 3.0}
"""Where rungs that are compared share a run. On a CPU everything else on the host is in a step.

Of a script whose passes over its data are shorter than that, at least TIMED_S: a pass begins with
a wait for its first batch, and of two passes one may take a quarter longer.
"""
TIMED_OPERATION_S = 0.5
"""Of each of an operation's parts, some ten in a run."""
MAX_WARMUP_S = 5.0
"""The longest warm-up, and the longest time that queues of loaders get to settle in a turn."""
MIN_WARMUP_STEPS, MIN_WARMUP_SEVERAL_OPTIMIZERS = 3, 7
"""Steps of a script's that are long; several optimizers show which steps least often."""
ROUND_FACTORS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
"""Of round numbers: a run is at most half as long again as it should be."""


def with_run_length(
    design: ExperimentDesign, step_s: float, *, interleaved: bool
) -> ExperimentDesign:
    """Its plan with as many steps as are to be timed and let pass, in round numbers."""
    step_s = max(1e-6, step_s)
    timed_s = _timed_s(design, step_s) if interleaved else TIMED_S
    timed_s = TIMED_OPERATION_S if design.is_operation else timed_s
    least = min(MIN_STEPS, max(MIN_TIMED_STEPS, round_up(MIN_STEPS * LONG_STEP_S / step_s)))
    timed = design.plan.edit(
        steps=min(MAX_STEPS, max(least, round_up(timed_s / step_s))),
        epochs=None,
        warmup_steps=_warmup_steps(design, round_up(MAX_WARMUP_S / step_s)),
    )
    return dataclasses.replace(design, plan=timed, trial_cache={})


def _timed_s(design: ExperimentDesign, step_s: float) -> float:
    timed_s = TIMED_INTERLEAVED_S[str(design.plan.device)]
    batches = (
        pytorch.training_loader(design.profile).batches_per_epoch
        if design.profile is not None
        else None
    )
    if batches is None or batches / design.plan.accumulate * step_s > timed_s:
        return timed_s
    return max(timed_s, TIMED_S)


def _warmup_steps(design: ExperimentDesign, in_time: int) -> int:
    planned = design.plan.warmup_steps or WARMUP_STEPS
    least = WARMUP_STEPS
    if design.profile is not None:
        fewest = (
            MIN_WARMUP_STEPS
            if len(design.profile.optimizers) < 2
            else MIN_WARMUP_SEVERAL_OPTIMIZERS
        )
        queued = max(0, planned - WARMUP_STEPS)
        least = min(least, max(fewest, in_time) + queued)
    return min(planned, max(least, in_time))


def interleaved_seconds(design: ExperimentDesign, trials: Sequence[Trial], step_s: float) -> float:
    """Seconds of the steps of these, which take turns, where a step of the real run takes so long.

    One whose batches are given again does not wait for them, as far as a first look saw that.
    """
    given_s = step_s
    if design.profile is not None:
        given_s = max(
            step_s - design.profile.input_wait_ms / 1e3, (device_busy_ms(design) or 0.0) / 1e3
        )
    turns, seconds, each_s = [rung.variant for rung in trials], 0.0, step_s
    for part in reversed(schedule_slots(turns, trials[0].plan)):
        # Steps in which a change takes effect are like those after them.
        if part.variant_index is not None:
            each_s = step_s if turns[part.variant_index].input == "real" else given_s
        seconds += part.steps * each_s
    return seconds


def round_up(steps: float) -> int:
    """The next of 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, ... from ``steps`` on."""
    size = 1
    while True:
        for factor in ROUND_FACTORS:
            if (found := math.ceil(factor * size)) >= steps:
                return found
        size *= 10
