"""Which rungs are asked for: by the causes that a plan can have, and by what was found so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nfold.explain import batch
from nfold.explain.account import Attribution
from nfold.explain.causes import CAUSES_BY_ID, Cause, applicable_causes
from nfold.explain.causes.input import real_input_trials
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.measured import TrialResults
from nfold.explain.pairs import cause_pairs
from nfold.explain.rows import FindingBuilder
from nfold.explain.rung import Trial
from nfold.explain.view import MetricView
from nfold.finding import Finding

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
        found += batch.break_even_trials(design)
    return list(dict.fromkeys(found))


def _promising_fixes(fixes: Mapping[str, Trial], view: MetricView, worse_ms: float) -> list[Trial]:
    """Those that are unknown, or about as good as the best; runs that only tell more stay."""
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
