"""Which runs have ends of epochs in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nfold.explain import asking
from nfold.explain.causes.epoch_boundary import EpochBoundary
from nfold.explain.ladder import Ladder
from nfold.explain.measured import Measured
from nfold.explain.rung import Rung, short_passes, whole_epochs
from nfold.explain.view import View
from nfold.plan import Plan

EPOCH_PART = 0.1
"""The part of the time budget that whole epochs may take."""
Steps = Callable[[Plan], int | None]
"""Of an epoch under a plan, None where nobody knows."""


def ends(ladder: Ladder, measured: Measured, epoch_steps: Steps, budget_s: float) -> list[Rung]:
    """Runs in which epochs end, for those ends of the ladder that have had none.

    Of passes that are cut short, where they can be; else whole epochs, if they are known to be
    short; if not, ``measured`` has the reason.
    """
    cause = EpochBoundary()
    if cause.absent(ladder) or cause.none_ends(ladder):
        return []
    view = measured.fit(asking.PROBING).view
    missing = [rung for rung in dict.fromkeys(cause.rungs(ladder)) if not view.has_gap(rung)]
    if cause.short(ladder):
        return list(map(short_passes, missing))
    reason = _too_long(ladder, missing, view, epoch_steps, budget_s)
    if reason is not None:
        measured.reasons |= dict.fromkeys(map(whole_epochs, missing), reason)
        return []
    return list(map(whole_epochs, missing))


def _too_long(
    ladder: Ladder, rungs: Iterable[Rung], view: View, epoch_steps: Steps, budget_s: float
) -> str | None:
    """Why whole epochs of these are not run."""
    taken_s = 0.0
    for rung in rungs:
        plan = whole_epochs(rung).plan
        steps = ladder.epoch_steps(plan) or epoch_steps(plan)
        if steps is None:
            return "how long an epoch is is not known"
        if (plan.warmup_steps or 0) > ((plan.epochs or 1) - 1) * steps:
            return f"epochs of {steps} steps are over in the warm-up"
        taken_s += (plan.epochs or 1) * steps * view.step(rung) / 1e3
    if taken_s > EPOCH_PART * budget_s:
        counted = EpochBoundary().counted(ladder)
        ahead = ", and what trains counts their batches ahead" * counted
        return f"whole epochs take {taken_s:.0f} s{ahead}; next: --budget {10 * taken_s:.0f}s"
    return None
