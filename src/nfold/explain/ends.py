"""Which runs have ends of epochs in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nfold.explain import asking
from nfold.explain.causes.epoch_boundary import EpochBoundaryCause
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.measured import TrialResults
from nfold.explain.rung import Trial, over_short_epochs, over_whole_epochs
from nfold.explain.view import MetricView
from nfold.plan import Plan

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
    view = results.fit(asking.PLANNING_RESAMPLES).view
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
    """Why whole epochs of these are not run."""
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
