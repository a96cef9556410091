"""From which batch on N devices beat one: lines through the measured steps of two batches each."""

from __future__ import annotations

import math

from nfold.explain.fit import Fit
from nfold.explain.ladder import Ladder
from nfold.explain.measured import Measured
from nfold.explain.rung import Rung
from nfold.explain.view import View
from nfold.finding import BatchLimit
from nfold.stats import Interval

LARGER = 4


def rungs(ladder: Ladder) -> tuple[Rung, ...]:
    """The steps that the lines go through: two batches on N devices and two on one."""
    batch = ladder.plan.batch or 1
    on_n = (ladder.full(), ladder.edited(batch=LARGER * batch))
    if ladder.scaling == "strong":
        return (*on_n, ladder.alone("real"), ladder.one)
    return (*on_n, ladder.alone("real"), ladder.alone("real", batch=LARGER * ladder.share))


def limit(ladder: Ladder, measured: Measured, fit: Fit, speedup: Interval) -> BatchLimit | None:
    """The limit, where N devices are slower than one; None where they help."""
    if speedup.high is None or speedup.high >= 1:
        return None
    asked = rungs(ladder)
    if not measured.has(asked):
        return BatchLimit(helps=False, batch=None, evidence=())
    found = fit.interval(lambda view: crossing(ladder, view))
    evidence = measured.ids(asked)
    if not math.isfinite(found.value):
        return BatchLimit(helps=False, batch=None, evidence=evidence)
    finite = found.high is not None and math.isfinite(found.high)
    batch = Interval(found.value, found.low, found.high if finite else None)
    return BatchLimit(helps=False, batch=batch, evidence=evidence)


def crossing(ladder: Ladder, view: View) -> float:
    """The global batch at which a sample takes N devices as long as one; infinite: at none.

    With x samples a device, one device takes a + b·x a step and N take c + d·x over N·x. Strong
    scaling gives one device all N·x in a step, weak scaling x in each of N steps.
    """
    n = ladder.devices
    many, more, share, other = (view.step(rung) for rung in rungs(ladder))
    x = (ladder.plan.batch or 1) / n
    slope_n = (more - many) / ((LARGER - 1) * x)
    fixed_n = many - slope_n * x
    far = n * x if ladder.scaling == "strong" else LARGER * x
    slope = (other - share) / (far - x)
    fixed = share - slope * x
    if ladder.scaling == "weak":
        fixed *= n
    gained = n * slope - slope_n
    return n * max(0.0, fixed_n - fixed) / gained if gained > 0 else math.inf
