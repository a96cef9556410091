"""The N-fold budget as a picture: from a step at N-fold speed to the one achieved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import altair as alt

from nfold.budget import Budget
from nfold.report.canvas import AXIS_LABEL_FORMAT, apply_size_and_style, base_chart
from nfold.report.figures import Figure, FigureRenderer
from nfold.report.ink import MUTED, SERIES, TEXT
from nfold.report.words import pluralize

BAR_HEIGHT = 30
MIN_REST_SHARE = 0.005
"""Of the goal: a smaller rest has no bar."""
TOTAL_COLOUR, LOSS_COLOUR, NOT_ATTRIBUTED_COLOUR = SERIES[0], SERIES[2], SERIES[6]


@dataclass(frozen=True, kw_only=True)
class WaterfallBar:
    """One bar: where it begins and ends, in milliseconds, and its colour."""

    name: str
    start: float
    end: float
    colour: str
    text: str


def waterfall_bars(budget: Budget) -> list[WaterfallBar]:
    """The goal, what is added to it (named causes, other rows, the rest), what was achieved.

    On one device nothing is in no row. Before the goal of several stands what one loses by itself.
    """
    at, several = budget.goal_ms, budget.devices > 1
    made = [*_of_one(budget), _end(budget.goal_label, at)]
    for row in (
        row for row in (budget.rows if several else budget.one_device_rows) if row.significant
    ):
        made.append(_loss(row.cause, at, row.lost_ms.value))
        at = made[-1].end
    rests = (("other rows", budget.not_significant_ms), ("unexplained", budget.not_attributed_ms))
    for name, rest in rests if several else rests[:1]:
        made.append(_loss(name, at, rest.value, NOT_ATTRIBUTED_COLOUR))
        at = made[-1].end
    return [*made, _end("achieved", at)]


def _of_one(budget: Budget) -> list[WaterfallBar]:
    """What one device spends by itself on a step that is the goal of several, where it is named."""
    named, bound = [row for row in budget.one_device_rows if row.significant], budget.device_bound
    if budget.devices == 1 or budget.scaling != "weak" or bound is None or not named:
        return []
    at = bound.step_ms.value
    made = [_end("compute alone", at)]
    for row in named:
        made.append(_loss(f"{row.cause} on 1 device", at, row.lost_ms.value))
        at = made[-1].end
    rest = budget.goal_ms - at
    small = abs(rest) < MIN_REST_SHARE * budget.goal_ms
    return (
        made if small else [*made, _loss("other rows on 1 device", at, rest, NOT_ATTRIBUTED_COLOUR)]
    )


def starts_from_one_device(budget: Budget) -> bool:
    """Whether N devices are counted from a step of one whose losses have names."""
    return bool(_of_one(budget))


def _end(name: str, value: float) -> WaterfallBar:
    return WaterfallBar(name=name, start=0, end=value, colour=TOTAL_COLOUR, text=f"{value:.2f}")


def _loss(name: str, at: float, cost: float, colour: str = LOSS_COLOUR) -> WaterfallBar:
    return WaterfallBar(name=name, start=at, end=at + cost, colour=colour, text=f"{cost:+.2f}")


def waterfall_chart(budget: Budget) -> Any:
    """The bars one below the other, each beginning where the one before ends."""
    made = waterfall_bars(budget)
    rows = [
        {
            "name": b.name,
            "start": b.start,
            "end": b.end,
            "text": b.text,
            "colour": b.colour,
            "right": max(b.start, b.end),
        }
        for b in made
    ]
    names = [bar.name for bar in made]
    top = 1.18 * max(float(str(row["right"])) for row in rows)
    axis = alt.Axis(ticks=False, domain=False, labelLimit=170, labelColor=TEXT)
    milliseconds = alt.Axis(labelExpr=AXIS_LABEL_FORMAT, tickCount=5, domain=False, ticks=False)
    scale = alt.Scale(domain=[0, top], nice=False)
    base = base_chart(rows).encode(y=alt.Y("name:N", title=None, sort=names, axis=axis))
    colour = alt.Color("colour:N", scale=None, legend=None)
    drawn = base.mark_bar(height={"band": 0.7}).encode(
        x=alt.X("start:Q", title=None, axis=milliseconds, scale=scale), x2="end:Q", color=colour
    )
    texts = base.mark_text(align="left", dx=6, color=TEXT).encode(
        x=alt.X("right:Q", scale=scale), text="text:N"
    )
    ideal = base_chart([{"x": budget.goal_ms}])
    line = ideal.mark_rule(strokeDash=[3, 3], color=MUTED).encode(x=alt.X("x:Q", scale=scale))
    return apply_size_and_style(alt.layer(drawn, line, texts), height=40 + BAR_HEIGHT * len(rows))


def waterfall_figure(budget: Budget) -> Figure:
    """The picture, drawn."""
    n = budget.devices
    start = f"From a step at {n}-fold speed" if n > 1 else "From the compute of a step"
    if starts_from_one_device(budget):
        start = f"From the compute of one device's step, which is one at {n}-fold speed,"
    note = f"{start} to the one achieved; what is lost lies between."
    return FigureRenderer("budget").render(
        waterfall_chart(budget), f"a step on {pluralize(n, 'device')} [ms]", note
    )
