"""The figures of a section as SVG, with titles and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from nfold.analysis import cell_labels
from nfold.analysis.comparison import CellResult
from nfold.analysis.part_timings import PartTiming
from nfold.analysis.sections import ReportSection, TelemetryRun, telemetry_run_of_cell
from nfold.core.format import format_number, terminal_safe
from nfold.core.measurement import Measurement
from nfold.core.stats import Interval
from nfold.report import chart_data, chart_elements
from nfold.report.chart_data import FigureData, FigureRow, TelemetryPanel
from nfold.report.chart_elements import (
    AXIS_LABEL_FORMAT,
    BAND,
    MUTED,
    SERIES,
    TEXT,
    LegendEntry,
    apply_size_and_style,
    apply_style,
    base_chart,
    colour_encoding,
    colour_legend,
    cycle_colours,
    line_chart,
    line_encodings,
    line_legend,
    uses_direct_labels,
    with_label_room,
    zero_based_axis,
)

Loads = tuple[TelemetryPanel, TelemetryPanel]  # of the devices and of the host
Span = tuple[float, float]  # seconds from the start of the telemetry
ROW_HEIGHT = 34
CROSS_PATH = "M-.7,-.7L.7,.7M-.7,.7L.7,-.7"
FAILURE_NOTE = "A cross on the axis is a cell without a result."


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawn chart. ``svg`` is sanitised."""

    title: str
    svg: str
    note: str = ""
    legend: tuple[LegendEntry, ...] = ()


@dataclass
class FigureRenderer:
    """Renders the figures of one section with unique names."""

    prefix: str
    count: int = 0

    def render(
        self, chart: Any, title: str, note: str = "", legend: tuple[LegendEntry, ...] = ()
    ) -> Figure:
        self.count += 1
        name = f"{self.prefix}-{self.count}"
        drawn = chart_elements.render_svg(chart, name=name, description=f"{title}. {note}".strip())
        return Figure(title=title, note=note, svg=drawn, legend=legend)


def section_figures(
    section: ReportSection, timings: Sequence[PartTiming], prefix: str
) -> list[Figure]:
    """Draw throughput, training time, speedup, parts of an operation and losses, if measured."""

    def training(result: CellResult) -> Interval | None:
        return None if result.training_s is None else Interval(result.training_s)

    drawing = FigureRenderer(prefix)
    found = section.results
    drawn = [
        _over_axis(drawing, found, lambda result: result.samples_per_s, "images/s"),
        _over_axis(drawing, found, training, _training_title(found)),
        _speedups(drawing, found),
        _parts(drawing, timings),
        _losses(drawing, found),
    ]
    return [figure for figure in drawn if figure is not None]


def _training_title(found: Sequence[CellResult]) -> str:
    epochs = sorted({r.plan.epochs for r in found if r.plan.epochs})
    length = f" of {epochs[0]} epochs" if len(epochs) == 1 else ""
    return f"training time{length.replace('1 epochs', '1 epoch')} [s]"


def _over_axis(
    drawing: FigureRenderer, found: Sequence[CellResult], number: Any, title: str
) -> Figure | None:
    data = chart_data.lines_over_axis(found, number)
    if data is None:
        return None
    if data.x_axis == "batch":
        note = FAILURE_NOTE if data.failed else ""
        chart = _batch_chart(data)
        return drawing.render(chart, f"{title} over the global batch", note, line_legend(data))
    over = "devices" if data.x_axis == "devices" else "plans"
    names = data.values(data.colour) if data.colour else []
    legend = colour_legend(names, cycle_colours(SERIES, len(names)), "square")
    return drawing.render(_bar_chart(data), f"{title} over {over}", legend=legend)


def _batch_chart(data: FigureData) -> Any:
    """Draw lines over the batch, on a log2 scale; a cross on the axis is a failed cell."""
    batches = sorted({row["x"] for row in (*data.rows, *data.failed)})
    ends = [batches[0] / 1.15, batches[-1] * 1.15]
    scale = alt.Scale(type="log", base=2, domain=ends, nice=False)
    axis = alt.Axis(values=batches, format=",d", grid=False, labelOverlap=True)
    x = alt.X("x:Q", title="global batch", scale=scale, axis=axis)
    chart = line_chart(data, x=x, top=1.08 * max(row["high"] for row in data.rows))
    if not data.failed:
        return apply_size_and_style(chart)
    failed = base_chart(data.failed)
    crosses = failed.mark_point(shape=CROSS_PATH, size=60, strokeWidth=2, filled=False, clip=False)
    place = with_label_room(x) if uses_direct_labels(data) else x
    colour = line_encodings(data)["color"]
    crosses = crosses.encode(x=place, y=alt.datum(0), color=colour)
    return apply_size_and_style(alt.layer(chart, crosses))


def _speedups(drawing: FigureRenderer, found: Sequence[CellResult]) -> Figure | None:
    data = chart_data.speedup_lines(found)
    if data is None:
        return None
    counts = sorted({row["x"] for row in data.rows})
    ideal = counts[-1]
    top = 1.05 * max(ideal, *(row["high"] for row in data.rows))
    axis = alt.Axis(values=counts, format="d", grid=False)
    scale = alt.Scale(domain=[min(counts) - 0.04 * ideal, ideal], nice=False)
    x = alt.X("x:Q", title="devices", scale=scale, axis=axis)
    place = with_label_room(x) if uses_direct_labels(data) else x
    ends = [{"x": 1, "y": 1}, {"x": ideal, "y": ideal}]
    line = base_chart(ends).mark_line(strokeDash=[3, 3], strokeWidth=1.2, color=MUTED)
    middle = (1 + 2 * ideal) / 3
    name = base_chart([{"x": middle, "y": middle, "name": "ideal"}])
    text = name.mark_text(align="right", dx=-12, dy=-6, color=MUTED).encode(text="name:N")
    both = [layer.encode(x=place, y=zero_based_axis(top)) for layer in (line, text)]
    chart = apply_size_and_style(alt.layer(*both, line_chart(data, x=x, top=top)))
    note = "Relative to one device under the same plan."
    return drawing.render(chart, "speedup over devices", note, line_legend(data))


def _parts(drawing: FigureRenderer, timings: Sequence[PartTiming]) -> Figure | None:
    """Draw the milliseconds of every part on a log scale, a dot per device count."""
    if not timings:
        return None
    rows: list[FigureRow] = [
        {
            "part": timing.part,
            "column": timing.column,
            **chart_data.value_and_bounds(timing.ms, "x"),
        }
        for timing in timings
    ]
    rows = [row for row in rows if row["low"] > 0]
    devices = list(dict.fromkeys(t.column for t in timings if not t.baseline))
    colours = dict(zip(devices, _time_colours(devices), strict=True))
    colours |= {t.column: SERIES[0] for t in timings if t.baseline}
    columns, chosen = list(colours), list(colours.values())
    names = list(dict.fromkeys(str(row["part"]) for row in rows))
    y = alt.Y("part:N", sort=names, title=None, axis=None)
    ends = [min(row["low"] for row in rows) / 1.6, max(row["high"] for row in rows) * 1.6]
    scale = alt.Scale(type="log", domain=ends, nice=False)
    axis = alt.Axis(format="~g", tickCount=5, labelOverlap=True)
    x = alt.X("x:Q", title="milliseconds, logarithmic", scale=scale, axis=axis)
    base = base_chart(rows).encode(x=x, y=y, color=colour_encoding("column", columns, chosen))
    dots = base.mark_point(filled=True, size=60, opacity=0.95, yOffset=7)
    errors = base.mark_rule(strokeWidth=1.4, yOffset=7, y2Offset=7).encode(x="low:Q", x2="high:Q")
    titles = base_chart([{"part": name} for name in names])
    titles = titles.mark_text(align="left", baseline="middle", dy=-8, color=TEXT)
    named = titles.encode(x=alt.value(2), y=y, text="part:N")
    height = 70 + ROW_HEIGHT * len(names)
    chart = apply_size_and_style(alt.layer(errors, dots, named), height=height)
    legend = colour_legend(columns, chosen, "circle")
    return drawing.render(chart, "parts of the operation [ms]", "", legend)


def _losses(drawing: FigureRenderer, found: Sequence[CellResult]) -> Figure | None:
    data = chart_data.loss_lines(found)
    if data is None:
        return None
    top = 1.05 * max(row["y"] for row in data.rows)
    axis = alt.Axis(labelExpr=AXIS_LABEL_FORMAT, tickCount=5, grid=False)
    x = alt.X("x:Q", title="samples seen", axis=axis, scale=alt.Scale(nice=False))
    chart = apply_size_and_style(line_chart(data, x=x, top=top, error_bars=False))
    note = "Mean over ranks, one line per cell. Lines of equal batch should coincide."
    return drawing.render(chart, "training loss over samples seen", note, line_legend(data))


def telemetry_figures(
    section: ReportSection, watched: TelemetryRun, prefix: str
) -> tuple[str, list[Figure]]:
    """Draw the telemetry of one run; return its name and a figure per quantity.

    The loads of devices and host share one figure if both were sampled.
    """
    drawing, measurement = FigureRenderer(prefix), watched.measurement
    loads, span = _loads_and_span(watched)
    drawn = [_loads(drawing, loads, span, LOAD_TITLE)] if loads else []
    shown = [panel.spec.columns for panel in loads or ()]
    for panel in chart_data.read_panels(watched.csv):
        if panel.spec.columns not in shown:
            legend = colour_legend(panel.lines, _time_colours(panel.lines))
            drawn.append(drawing.render(_time_chart(panel, span), panel.spec.title, "", legend))
    return _name(section, measurement), drawn


LOAD_TITLE = "load of the devices and of the host"
MAX_LOAD_FIGURES = 24  # per page


def load_figures(
    sections: Sequence[ReportSection], results_folder: Path, prefix: str
) -> list[Figure]:
    """Draw the loads of the latest run of every cell, at most ``MAX_LOAD_FIGURES``."""
    drawing, made = FigureRenderer(prefix), list[Figure]()
    for section in sections:
        for result in section.results:
            watched = telemetry_run_of_cell(result.cell, results_folder)
            if watched is None or len(made) == MAX_LOAD_FIGURES:
                continue
            loads, span = _loads_and_span(watched)
            if loads is not None:
                title = f"{section.workload}: {_name(section, watched.measurement)}"
                made.append(_loads(drawing, loads, span, terminal_safe(title)))
    return made


def _name(section: ReportSection, measurement: Measurement) -> str:
    differing = dict.fromkeys(["devices", "batch", *cell_labels.varying_axes(section.cells)])
    return terminal_safe(cell_labels.cell_label(measurement, tuple(differing)))


def _loads_and_span(watched: TelemetryRun) -> tuple[Loads | None, Span | None]:
    plan = watched.measurement.plan
    cores = plan.cores_per_device if plan.device == "cpu" else None
    loads = chart_data.read_load_panels(watched.csv, cores)
    return loads, chart_data.timed_span(watched.csv, watched.measurement)


def _loads(drawing: FigureRenderer, loads: Loads, span: Span | None, title: str) -> Figure:
    """Draw the load of the devices above the load of the host, over the same seconds, 0 to 100 %.

    A device that waits while the host is busy shows as a gap above a plateau.
    """
    last = max(row["x"] for panel in loads for row in panel.rows) or 1
    names, drawn = loads[0].lines, []
    for panel, below in zip(loads, (False, True), strict=True):
        axis = alt.Axis(tickCount=5, grid=False, labels=below, ticks=below)
        scale = alt.Scale(domain=[0, last], nice=False)
        x = alt.X("x:Q", title="seconds" if below else None, axis=axis, scale=scale)
        top = max(100.0, *(row["y"] for row in panel.rows))
        lines = _time_lines(panel, span, x, top, [MUTED] if below else _time_colours(names))
        size = {"width": LOAD_WIDTH, "height": LOAD_HEIGHT}
        drawn.append(lines.properties(**size, title=panel.spec.title))
    chart = apply_style(alt.vconcat(*drawn, spacing=10).resolve_scale(color="independent"))
    return drawing.render(chart, title, "", colour_legend(names, _time_colours(names)))


LOAD_WIDTH, LOAD_HEIGHT = 350, 90


def _bar_chart(data: FigureData) -> Any:
    rows = [{**row, "text": format_number(row["y"])} for row in data.rows]
    rows += [{**row, "y": 0, "low": 0, "high": 0, "text": row["status"]} for row in data.failed]
    names = list(dict.fromkeys(row["x"] for row in rows))
    top = 1.3 * max(row["high"] for row in rows)
    axis = alt.Axis(ticks=False, domain=False, labelLimit=170, labelColor=TEXT)
    base = base_chart(rows).encode(
        y=alt.Y("x:N", title=None, sort=names, axis=axis),
        x=alt.X("y:Q", title=None, axis=None, scale=alt.Scale(domain=[0, top], nice=False)),
        **({"yOffset": alt.YOffset(f"{data.colour}:N")} if data.colour else {}),
    )
    drawn = base.mark_bar(height={"band": 0.72}, opacity=0.9).encode(
        color=line_encodings(data)["color"]
    )
    errors = base.mark_rule(color=TEXT, strokeWidth=1.2).encode(x="low:Q", x2="high:Q")
    named = base.mark_text(align="left", dx=6, color=TEXT).encode(x="high:Q", text="text:N")
    groups = len(data.values(data.colour)) if data.colour else 1
    height = 40 + 30 * len(names) * groups
    return apply_size_and_style(alt.layer(drawn, errors, named), height=height)


def _time_colours(names: Sequence[str]) -> list[str]:
    """Return colours of lines over time; grey is for baselines."""
    return cycle_colours(SERIES[1:], len(names))


def _time_chart(panel: TelemetryPanel, span: Span | None) -> Any:
    """Draw one quantity over seconds, a line per device, with a band over the timed windows."""
    highest = max(row["y"] for row in panel.rows)
    last = max(row["x"] for row in panel.rows)
    axis = alt.Axis(tickCount=5, grid=False)
    x = alt.X("x:Q", title="seconds", axis=axis, scale=alt.Scale(domain=[0, last or 1], nice=False))
    top = panel.spec.top or 1.1 * highest or 1.0
    lines = _time_lines(panel, span, x, top, _time_colours(panel.lines))
    return apply_size_and_style(lines, height=190)


def _time_lines(
    panel: TelemetryPanel, span: Span | None, x: Any, top: float, colours: Sequence[str]
) -> Any:
    y, colour = zero_based_axis(top), colour_encoding("line", panel.lines, colours)
    lines = base_chart(panel.rows).mark_line(strokeWidth=1.4).encode(x=x, y=y, color=colour)
    return alt.layer(*_band(span, x, top), lines)


def _band(span: Span | None, x: Any, top: float) -> list[Any]:
    if span is None:
        return []
    rows = [{"x": span[0], "end": span[1], "y": 0, "y2": top}]
    base = base_chart(rows).encode(x=x, y=zero_based_axis(top))
    return [base.mark_rect(color=BAND).encode(x2="end:Q", y2="y2:Q")]
