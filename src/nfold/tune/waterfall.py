"""The way from the step time of the original to that of the result, remedy by remedy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nfold.core.format import join_words
from nfold.core.stats import Interval
from nfold.explain.result.budget import Budget
from nfold.tune.result import Tried, TuneResult

MIN_DIFFERENCE = 0.01  # of the final step: smaller differences are not shown


@dataclass(frozen=True, kw_only=True)
class WaterfallBar:
    """A bar from ``start_ms`` to ``end_ms``, per step of the original batch.

    ``kind``: a ``step`` begins at 0, a ``remedy`` has a gain, ``difference`` is that of the fresh
    runs from the product of the gains, ``left`` is the distance to N-fold speed.
    """

    label: str
    start_ms: float
    end_ms: float
    kind: Literal["step", "remedy", "difference", "left"]
    gain: Interval | None = None


def waterfall_bars(result: TuneResult) -> tuple[WaterfallBar, ...]:
    """Return the bars from top to bottom; empty if the original was not measured."""
    return tuple(_bars(result))


def _bars(result: TuneResult) -> Iterator[WaterfallBar]:
    at = result.verification.original_ms
    if at is None:
        return
    yield WaterfallBar(label="original", start_ms=0.0, end_ms=at, kind="step")
    for group in kept_groups(result):
        gain = group[0].gain
        if gain is None:
            continue
        label = join_words([one.remedy.label for one in group])
        end = at / gain.value
        yield WaterfallBar(label=label, start_ms=at, end_ms=end, kind="remedy", gain=gain)
        at = end
    final = result.verification.final_ms
    if final is not None:
        if abs(final - at) > MIN_DIFFERENCE * final:
            label = "difference in fresh runs"
            yield WaterfallBar(label=label, start_ms=at, end_ms=final, kind="difference")
        yield WaterfallBar(label="final", start_ms=0.0, end_ms=final, kind="step")
        at = final
    if result.final_budget is None or result.devices == 1:
        return
    ideal, devices = _ideal_ms(result, result.final_budget), result.devices
    if at > ideal:
        label = f"left to {devices}-fold"
        yield WaterfallBar(label=label, start_ms=at, end_ms=ideal, kind="left")
    yield WaterfallBar(label=f"{devices}-fold", start_ms=0.0, end_ms=ideal, kind="step")


def kept_groups(result: TuneResult) -> list[list[Tried]]:
    """Return the kept remedies; those that were measured together are one group with one gain."""
    by_remedy = {one.remedy: one for one in result.tried}
    kept = [by_remedy[one] for one in result.kept]
    return [list(group) for _, group in itertools.groupby(kept, key=lambda one: one.gain)]


def _ideal_ms(result: TuneResult, budget: Budget) -> float:
    samples = (result.original.plan.batch or 1) / (budget.plan.batch or 1)
    return budget.ideal_ms.value * samples
