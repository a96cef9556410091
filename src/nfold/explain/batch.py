"""From which batch on N devices beat one: lines through the measured steps of two batches each."""

from __future__ import annotations

import math

from nfold.explain.fit import BootstrapFit
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.measured import TrialResults
from nfold.explain.rung import Trial
from nfold.explain.view import MetricView
from nfold.finding import BreakEvenBatch
from nfold.stats import Interval

BATCH_FACTOR = 4


def break_even_trials(design: ExperimentDesign) -> tuple[Trial, ...]:
    """The steps that the lines go through: two batches on N devices and two on one."""
    batch = design.plan.batch or 1
    on_n = (design.actual(), design.with_plan(batch=BATCH_FACTOR * batch))
    if design.scaling == "strong":
        return (*on_n, design.one_device("real"), design.baseline)
    return (
        *on_n,
        design.one_device("real"),
        design.one_device("real", batch=BATCH_FACTOR * design.batch_per_device),
    )


def find_break_even_batch(
    design: ExperimentDesign, results: TrialResults, fit: BootstrapFit, speedup: Interval
) -> BreakEvenBatch | None:
    """The limit, where N devices are slower than one; None where they help."""
    if speedup.high is None or speedup.high >= 1:
        return None
    asked = break_even_trials(design)
    if not results.has(asked):
        return BreakEvenBatch(devices_help=False, batch=None, evidence=())
    found = fit.interval(lambda view: break_even_batch(design, view))
    evidence = results.ids(asked)
    if not math.isfinite(found.value):
        return BreakEvenBatch(devices_help=False, batch=None, evidence=evidence)
    finite = found.high is not None and math.isfinite(found.high)
    batch = Interval(found.value, found.low, found.high if finite else None)
    return BreakEvenBatch(devices_help=False, batch=batch, evidence=evidence)


def break_even_batch(design: ExperimentDesign, view: MetricView) -> float:
    """The global batch at which a sample takes N devices as long as one; infinite: at none.

    With x samples a device, one device takes a + b·x a step and N take c + d·x over N·x. Strong
    scaling gives one device all N·x in a step, weak scaling x in each of N steps.
    """
    n = design.devices
    many, more, share, other = (view.step(rung) for rung in break_even_trials(design))
    x = (design.plan.batch or 1) / n
    slope_n = (more - many) / ((BATCH_FACTOR - 1) * x)
    fixed_n = many - slope_n * x
    far = n * x if design.scaling == "strong" else BATCH_FACTOR * x
    slope = (other - share) / (far - x)
    fixed = share - slope * x
    if design.scaling == "weak":
        fixed *= n
    gained = n * slope - slope_n
    return n * max(0.0, fixed_n - fixed) / gained if gained > 0 else math.inf
