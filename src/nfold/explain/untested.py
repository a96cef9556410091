"""Causes of which nothing is known, and why."""

from __future__ import annotations

from nfold.explain import lines
from nfold.explain.causes import CAUSES
from nfold.explain.causes.epoch_boundary import EpochBoundary
from nfold.explain.fit import View
from nfold.explain.ladder import Ladder
from nfold.explain.measured import Measured
from nfold.finding import NO_TIME, AtLeast


def untested(ladder: Ladder, measured: Measured, view: View) -> list[tuple[str, str]]:
    """Each with its reason: a plan cannot have it, its runs failed, or there was no time."""
    found = []
    for cause in CAUSES:
        asked = {*cause.rungs(ladder), *cause.single_evidence(ladder)}
        reason = cause.absent(ladder) or measured.missing(asked)
        if reason is None and not cause.known(ladder, view):
            told = [measured.reasons.get(rung) for rung in cause.telling(ladder)]
            reason = next(filter(None, reversed(told)), NO_TIME)
        if reason is not None:
            found.append((cause.id, reason))
    return found


def at_least(ladder: Ladder, measured: Measured) -> AtLeast | None:
    """What lies between two epochs, where a run of passes that are cut short was ended in it."""
    for rung in EpochBoundary().short(ladder):
        steps, seconds = ladder.epoch_steps(rung.plan), measured.stalled_s.get(rung)
        if ladder.seen is not None and steps and seconds:
            fix = lines.between_epochs(ladder.seen, waits=False)
            devices = rung.plan.devices or 1
            return AtLeast(seconds=seconds, steps=steps, devices=devices, fix=fix)
    return None
