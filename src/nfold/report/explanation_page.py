"""The HTML page of an explanation, in the order of the terminal: conclusion, change, account."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
from markupsafe import Markup

from nfold import __version__
from nfold.core.format import pluralize
from nfold.core.stats import Interval
from nfold.explain.result.budget import Budget, Change, StepAccount, TrialSummary
from nfold.explain.result.view import ExplanationView, format_ms, format_percent
from nfold.report import explanation
from nfold.report.chart_data import FigureRow
from nfold.report.chart_elements import (
    AXIS_LABEL_FORMAT,
    MUTED,
    SERIES,
    TEXT,
    apply_size_and_style,
    base_chart,
    colour_legend,
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
    shown = enumerate(source[first - 1 : target + CONTEXT_LINES], start=first)
    lines = tuple(CodeLine(number=at, text=text, is_target=at == target) for at, text in shown)
    return CodeExcerpt(change=change, lines=lines)


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


def _names_axis(names: list[str]) -> Any:
    width: Any = {"labelLimit": LABEL_WIDTH, "minExtent": LABEL_WIDTH}
    axis = alt.Axis(ticks=False, domain=False, labelColor=TEXT, **width)
    return alt.Y("name:N", title=None, sort=names, axis=axis)


def _milliseconds() -> Any:
    return alt.Axis(labelExpr=AXIS_LABEL_FORMAT, tickCount=8, domain=False, ticks=False, title=None)


def _fill() -> Any:
    return alt.Color("colour:N", scale=None, legend=None)


def _wide(chart: Any, rows: int, height: int = BAR_HEIGHT) -> Any:
    return apply_size_and_style(chart, 40 + height * rows, PAGE_WIDTH)


def _step_figure(drawing: FigureRenderer, budget: Budget, account: StepAccount) -> Figure:
    colours, data = _colours(account), list[FigureRow]()
    bars = [("1 device", account.one_device)]
    bars.append((pluralize(budget.devices, "device"), account.rows))
    names = [name for name, rows in bars if rows]
    for name, rows in bars:
        at = 0.0
        for row in rows:
            width = max(0.0, row.ms.value)
            text = format_ms(width) if width > 0.06 * account.step_ms.value else ""
            place = {"start": at, "end": at + width, "middle": at + width / 2}
            data.append({"name": name, **place, "colour": colours[row.id], "text": text})
            at += width
    base = base_chart(data).encode(y=_names_axis(names))
    x = alt.X("start:Q", axis=_milliseconds(), scale=alt.Scale(nice=False))
    drawn = base.mark_bar(height={"band": 0.66}).encode(x=x, x2="end:Q", color=_fill())
    texts = base.mark_text(color="#ffffff", fontWeight="bold").encode(x="middle:Q", text="text:N")
    shown = [row for row in account.rows if row.ms.value > 0]
    legend = colour_legend(
        [row.label for row in shown], [colours[row.id] for row in shown], "square"
    )
    note = "Both do the same work per device." if len(names) > 1 else ""
    chart = _wide(alt.layer(drawn, texts), len(names), 48)
    return drawing.render(chart, "Where a step goes, ms", note, legend)


def waterfall_rows(account: StepAccount) -> list[FigureRow]:
    """Return compute, then every cost on top of it, up to the measured step, as bars in ms.

    ``low`` and ``high`` bound where a bar ends.
    """

    def row(name: str, start: float, ms: Interval, colour: str, text: str) -> FigureRow:
        bounds = {"low": start + (ms.value if ms.low is None else ms.low)}
        bounds["high"] = start + (ms.value if ms.high is None else ms.high)
        place = {"start": start, "end": start + ms.value}
        return {"name": name, "colour": colour, "text": text, **place, **bounds}

    colours, at, rows = _colours(account), 0.0, list[FigureRow]()
    step = account.step_ms
    for cost in account.rows:
        text = f"{format_ms(cost.ms.value)} ms, {format_percent(cost.ms.value / step.value)}"
        rows.append(row(cost.label, at, cost.ms, colours[cost.id], text))
        at += cost.ms.value
    return [*rows, row("measured step", 0.0, step, TEXT, f"{format_ms(step.value)} ms")]


def _waterfall_figure(drawing: FigureRenderer, budget: Budget, account: StepAccount) -> Figure:
    title = f"A step on {pluralize(budget.devices, 'device')}, ms"
    return waterfall_figure(drawing, waterfall_rows(account), title)


def waterfall_figure(drawing: FigureRenderer, rows: list[FigureRow], title: str) -> Figure:
    """Draw bars from ``start`` to ``end`` with their ``text``, and intervals from ``low`` to ``high``."""
    # An interval may be far wider than the step: it ends at the edge of the picture.
    right = 1.3 * max(row["end"] for row in rows)
    for row in rows:
        row["start"], row["end"] = sorted((row["start"], row["end"]))
        row["high"] = min(right, row["high"])
        row["low"] = min(max(0.0, row["low"]), row["high"])
        row["edge"] = max(row["end"], row["high"])
    base = base_chart(rows).encode(y=_names_axis([row["name"] for row in rows]))
    scale = alt.Scale(domain=[0, 1.15 * right], nice=False)
    x = alt.X("start:Q", axis=_milliseconds(), scale=scale)
    drawn = base.mark_bar(height={"band": 0.62}).encode(x=x, x2="end:Q", color=_fill())
    rule = base.mark_rule(color=MUTED, strokeWidth=1.5)
    intervals = rule.encode(x=alt.X("low:Q", scale=scale), x2="high:Q")
    text = base.mark_text(align="left", dx=8, color=TEXT)
    texts = text.encode(x=alt.X("edge:Q", scale=scale), text="text:N")
    chart = _wide(alt.layer(drawn, intervals, texts), len(rows))
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
            color=_fill(),
        )
    )
    legend = colour_legend(["1 device", "all devices"], (SERIES[1], SERIES[2]), "circle")
    title = "Every run of every variant, ms per step"
    note = (
        "One dot per run, without the time between epochs. A difference of two variants is a cost."
    )
    return drawing.render(_wide(chart, len(names), 22), title, note, legend)
