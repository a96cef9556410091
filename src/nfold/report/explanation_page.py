"""The HTML page of an explanation, in the order of the terminal: conclusion, change, account."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
from markupsafe import Markup

from nfold import __version__
from nfold.core.format import pluralize
from nfold.explain.result.budget import AccountRow, Budget, Change, StepAccount, TrialSummary
from nfold.explain.result.view import ExplanationView, format_ms, format_percent
from nfold.report import explanation
from nfold.report.chart_elements import (
    AXIS_LABEL_FORMAT,
    MUTED,
    SERIES,
    TEXT,
    apply_style,
    base_chart,
    mark_legend,
)
from nfold.report.figures import Figure, FigureRenderer
from nfold.report.html_page import content_security_policy, load_style_sheet, load_template

PAGE_WIDTH = 1100
BAR_HEIGHT = 30
LABEL_WIDTH = 230
CONTEXT_LINES = 3
COMPUTE_COLOUR, NOT_ATTRIBUTED_COLOUR = SERIES[1], SERIES[0]
COST_COLOURS = (SERIES[2], SERIES[4], SERIES[5], SERIES[3], SERIES[7], SERIES[6])


@dataclass(frozen=True, kw_only=True)
class CodeLine:
    number: int
    text: str
    is_target: bool


@dataclass(frozen=True, kw_only=True)
class CodeExcerpt:
    """A change with the lines of the user's file around it; none if the file is not readable."""

    change: Change
    lines: tuple[CodeLine, ...]


@dataclass(frozen=True, kw_only=True)
class WaterfallBar:
    """A bar from ``start`` to ``end`` in ms; ``low`` and ``high`` bound where it ends."""

    name: str
    start: float
    end: float
    colour: str
    text: str
    low: float | None = None
    high: float | None = None


def explanation_page(view: ExplanationView, budget: Budget) -> str:
    """The page: one file, no script, nothing fetched."""
    style = load_style_sheet()
    drawing = FigureRenderer("explain")
    account = budget.account
    return load_template("explain.html.j2").render(
        view=view,
        target=budget.target,
        excerpts=[code_excerpt(change) for change in budget.changes],
        figures=explanation_figures(drawing, budget, account) if account else [],
        tables=explanation.detail_tables(budget),
        notes=explanation.detail_notes(budget),
        runs=explanation.run_ids(budget),
        style=Markup(style),  # noqa: S704  # our own file and colours
        policy=content_security_policy(style),
        version=__version__,
    )


def code_excerpt(change: Change) -> CodeExcerpt:
    """The line of a change and three lines on either side, as the file is now."""
    path, _, number = change.location.partition(", ")[0].rpartition(":")
    if not (path and number.isdigit()):
        return CodeExcerpt(change=change, lines=())
    try:
        source = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return CodeExcerpt(change=change, lines=())
    target = int(number)
    first = max(1, target - CONTEXT_LINES)
    lines = source[first - 1 : target + CONTEXT_LINES]
    return CodeExcerpt(
        change=change,
        lines=tuple(
            CodeLine(number=at, text=text, is_target=at == target)
            for at, text in enumerate(lines, start=first)
        ),
    )


def explanation_figures(
    drawing: FigureRenderer, budget: Budget, account: StepAccount
) -> list[Figure]:
    """The step on one device and on all, the waterfall, every trial."""
    found = [_step_figure(drawing, budget, account), _waterfall_figure(drawing, budget, account)]
    if any(trial.step_ms for trial in budget.trials):
        found.append(_trials_figure(drawing, budget.trials))
    return found


def _colours(account: StepAccount) -> dict[str, str]:
    colours = {"compute": COMPUTE_COLOUR, "not-attributed": NOT_ATTRIBUTED_COLOUR}
    for number, row in enumerate(account.costs):
        colours[row.id] = COST_COLOURS[number % len(COST_COLOURS)]
    return colours


def _axis_y(**more: Any) -> Any:
    return alt.Axis(
        ticks=False,
        domain=False,
        labelLimit=LABEL_WIDTH,
        minExtent=LABEL_WIDTH,
        labelColor=TEXT,
        **more,
    )


def _milliseconds(**more: Any) -> Any:
    return alt.Axis(
        labelExpr=AXIS_LABEL_FORMAT, tickCount=8, domain=False, ticks=False, title=None, **more
    )


def _wide(chart: Any, rows: int, height: int = BAR_HEIGHT) -> Any:
    fitted = alt.AutoSizeParams(type="fit", contains="padding")
    sized = chart.properties(width=PAGE_WIDTH, height=40 + height * rows, autosize=fitted)
    return apply_style(sized)


def _step_figure(drawing: FigureRenderer, budget: Budget, account: StepAccount) -> Figure:
    colours, data = _colours(account), list[dict[str, Any]]()
    n = pluralize(budget.devices, "device")
    bars = [("1 device", account.one_device), (n, account.rows)]
    drawn = [(name, rows) for name, rows in bars if rows]
    for name, rows in drawn:
        at = 0.0
        for row in rows:
            width = max(0.0, row.ms.value)
            wide_enough = width > 0.06 * account.step_ms.value
            label = format_ms(width) if wide_enough else ""
            data.append(
                {
                    "bar": name,
                    "start": at,
                    "end": at + width,
                    "middle": at + width / 2,
                    "colour": colours[row.id],
                    "text": label,
                }
            )
            at += width
    names = [name for name, _ in drawn]
    base = base_chart(data).encode(y=alt.Y("bar:N", title=None, sort=names, axis=_axis_y()))
    x = alt.X("start:Q", axis=_milliseconds(), scale=alt.Scale(nice=False))
    bars_drawn = base.mark_bar(height={"band": 0.66}).encode(
        x=x, x2="end:Q", color=alt.Color("colour:N", scale=None, legend=None)
    )
    texts = base.mark_text(color="#ffffff", fontWeight="bold").encode(x="middle:Q", text="text:N")
    shown = [row for row in account.rows if row.ms.value > 0]
    legend = mark_legend([row.label for row in shown], [colours[row.id] for row in shown], "square")
    note = "Both do the same work per device." if len(names) > 1 else ""
    chart = _wide(alt.layer(bars_drawn, texts), len(names), 48)
    return drawing.render(chart, "Where a step goes, ms", note, legend)


def waterfall_bars(account: StepAccount) -> list[WaterfallBar]:
    """Compute, then every cost on top of it, up to the measured step."""
    colours, at, bars = _colours(account), 0.0, list[WaterfallBar]()
    step = account.step_ms
    for row in account.rows:
        end = at + row.ms.value
        part = format_percent(row.ms.value / step.value)
        bars.append(_bar(row, at, end, colours[row.id], f"{format_ms(row.ms.value)} ms, {part}"))
        at = end
    total = WaterfallBar(
        name="measured step",
        start=0.0,
        end=step.value,
        colour=TEXT,
        text=f"{format_ms(step.value)} ms",
        low=step.low,
        high=step.high,
    )
    return [*bars, total]


def _bar(row: AccountRow, at: float, end: float, colour: str, text: str) -> WaterfallBar:
    low, high = row.ms.low, row.ms.high
    return WaterfallBar(
        name=row.label,
        start=at,
        end=end,
        colour=colour,
        text=text,
        low=None if low is None else at + low,
        high=None if high is None else at + high,
    )


def _waterfall_figure(drawing: FigureRenderer, budget: Budget, account: StepAccount) -> Figure:
    bars = waterfall_bars(account)
    # An interval may be far wider than the step: it ends at the edge of the picture.
    right = 1.3 * max(bar.end for bar in bars)
    data: list[dict[str, Any]] = []
    for bar in bars:
        low = max(0.0, bar.low if bar.low is not None else bar.end)
        high = min(right, bar.high if bar.high is not None else bar.end)
        edge = max(bar.start, bar.end, high)
        data.append(
            {
                "name": bar.name,
                "start": min(bar.start, bar.end),
                "end": max(bar.start, bar.end),
                "colour": bar.colour,
                "text": bar.text,
                "low": min(low, high),
                "high": high,
                "edge": edge,
            }
        )
    names = [bar.name for bar in bars]
    base = base_chart(data).encode(y=alt.Y("name:N", title=None, sort=names, axis=_axis_y()))
    scale = alt.Scale(domain=[0, 1.15 * right], nice=False)
    drawn = base.mark_bar(height={"band": 0.62}).encode(
        x=alt.X("start:Q", axis=_milliseconds(), scale=scale),
        x2="end:Q",
        color=alt.Color("colour:N", scale=None, legend=None),
    )
    intervals = base.mark_rule(color=MUTED, strokeWidth=1.5).encode(
        x=alt.X("low:Q", scale=scale), x2="high:Q"
    )
    texts = base.mark_text(align="left", dx=8, color=TEXT).encode(
        x=alt.X("edge:Q", scale=scale), text="text:N"
    )
    chart = _wide(alt.layer(drawn, intervals, texts), len(bars))
    title = f"A step on {pluralize(budget.devices, 'device')}, ms"
    note = "Lines are 95 % intervals; those wider than the picture end at its edge."
    return drawing.render(chart, title, note)


def _trials_figure(drawing: FigureRenderer, trials: tuple[TrialSummary, ...]) -> Figure:
    ordered = sorted((one for one in trials if one.step_ms), key=lambda one: min(one.step_ms))
    data = [
        {"label": one.label, "ms": value, "colour": SERIES[1] if one.devices == 1 else SERIES[2]}
        for one in ordered
        for value in one.step_ms
    ]
    names = list(dict.fromkeys(one.label for one in ordered))
    axis = alt.Axis(ticks=False, domain=False, labelLimit=420, labelColor=TEXT, grid=True)
    chart = (
        base_chart(data)
        .mark_circle(size=64, opacity=0.75)
        .encode(
            y=alt.Y("label:N", title=None, sort=names, axis=axis),
            x=alt.X("ms:Q", axis=_milliseconds(), scale=alt.Scale(zero=True, nice=False)),
            color=alt.Color("colour:N", scale=None, legend=None),
        )
    )
    legend = mark_legend(["1 device", "all devices"], (SERIES[1], SERIES[2]), "circle")
    title = "Every run of every variant, ms per step"
    note = (
        "One dot per run, without the time between epochs. A difference of two variants is a cost."
    )
    return drawing.render(_wide(chart, len(names), 22), title, note, legend)
