"""Causes of which nothing is known, and why."""

from __future__ import annotations

from nfold.explain import pausing
from nfold.explain.causes import Cause, applicable_causes
from nfold.explain.causes.epoch_boundary import EpochBoundaryCause
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.measured import TrialResults
from nfold.explain.view import MetricView
from nfold.finding import NOT_ENOUGH_TIME, LowerBound


def unmeasured_causes(
    design: ExperimentDesign, results: TrialResults, view: MetricView
) -> list[tuple[str, str]]:
    """Each with its reason: a plan cannot have it, its runs failed, or there was no time."""
    found = []
    for cause in applicable_causes(design):
        asked = {*cause.multi_device_trials(design), *cause.one_device_evidence(design)}
        reason = cause.skipped_reason(design) or results.missing_reason(asked)
        unknown = cause.unknown_part(design, view) if reason is None else None
        if unknown is not None:
            reason = unknown + _unmeasured_reason(cause, design, results)
        if reason is not None:
            found.append((cause.id, reason))
    return found


def _unmeasured_reason(cause: Cause, design: ExperimentDesign, results: TrialResults) -> str:
    never = cause.endless_reason(design) if isinstance(cause, EpochBoundaryCause) else None
    if never is not None:
        return never
    told = [results.reasons.get(rung) for rung in cause.refining_trials(design)]
    return next(filter(None, reversed(told)), NOT_ENOUGH_TIME)


def epoch_boundary_lower_bound(
    design: ExperimentDesign, results: TrialResults, view: MetricView
) -> LowerBound | None:
    """What lies between two epochs of a script, where one device's is unknown.

    Where a run of passes that are cut short was ended in it, so long at least.
    """
    if design.profile is None:
        return None
    cause, full = EpochBoundaryCause(), design.actual()
    steps = design.epoch_steps(full.plan)
    if steps and view.has_epoch_gap(full) and not view.has_epoch_gap(design.baseline):
        seconds, fix = view.epoch_gap(full) * steps / 1e3, cause.fix(design, view)
        return LowerBound(
            seconds=seconds, steps=steps, devices=design.devices, fix=fix, is_complete=True
        )
    for rung in cause.short_epoch_trials(design):
        steps, stalled_s = design.epoch_steps(rung.plan), results.stalled_s.get(rung)
        if steps and stalled_s:
            fix, devices = (
                pausing.shorten_epoch_boundary(design.profile, waits=False),
                rung.plan.devices or 1,
            )
            return LowerBound(seconds=stalled_s, steps=steps, devices=devices, fix=fix)
    return None
