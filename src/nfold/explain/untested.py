"""Causes of which nothing is known, and why."""

from __future__ import annotations

from nfold.explain import pausing
from nfold.explain.causes import Cause, causes_of
from nfold.explain.causes.epoch_boundary import EpochBoundary
from nfold.explain.ladder import Ladder
from nfold.explain.measured import Measured
from nfold.explain.view import View
from nfold.finding import NO_TIME, AtLeast


def untested(ladder: Ladder, measured: Measured, view: View) -> list[tuple[str, str]]:
    """Each with its reason: a plan cannot have it, its runs failed, or there was no time."""
    found = []
    for cause in causes_of(ladder):
        asked = {*cause.on_n(ladder), *cause.single_evidence(ladder)}
        reason = cause.absent(ladder) or measured.missing(asked)
        unknown = cause.unknown(ladder, view) if reason is None else None
        if unknown is not None:
            reason = unknown + _why(cause, ladder, measured)
        if reason is not None:
            found.append((cause.id, reason))
    return found


def _why(cause: Cause, ladder: Ladder, measured: Measured) -> str:
    never = cause.none_ends(ladder) if isinstance(cause, EpochBoundary) else None
    if never is not None:
        return never
    told = [measured.reasons.get(rung) for rung in cause.telling(ladder)]
    return next(filter(None, reversed(told)), NO_TIME)


def at_least(ladder: Ladder, measured: Measured, view: View) -> AtLeast | None:
    """What lies between two epochs of a script, where one device's is unknown.

    Where a run of passes that are cut short was ended in it, so long at least.
    """
    if ladder.seen is None:
        return None
    cause, full = EpochBoundary(), ladder.full()
    steps = ladder.epoch_steps(full.plan)
    if steps and view.has_gap(full) and not view.has_gap(ladder.one):
        seconds, fix = view.gap(full) * steps / 1e3, cause.fix(ladder, view)
        return AtLeast(seconds=seconds, steps=steps, devices=ladder.devices, fix=fix, whole=True)
    for rung in cause.short(ladder):
        steps, stalled_s = ladder.epoch_steps(rung.plan), measured.stalled_s.get(rung)
        if steps and stalled_s:
            fix, devices = pausing.between_epochs(ladder.seen, waits=False), rung.plan.devices or 1
            return AtLeast(seconds=stalled_s, steps=steps, devices=devices, fix=fix)
    return None
