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
from nfold.report.chart_data import FigureData, FigureRow, LoadPanels, TelemetryPanel
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
    cycle_colours,
    line_chart,
    line_encodings,
    line_legend,
    mark_legend,
    stroke_legend,
    uses_direct_labels,
    with_label_room,
    zero_based_axis,
)

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
    drawing = FigureRenderer(prefix)
    found = section.results
    drawn = [
        _over_axis(drawing, found, _rate, "images/s"),
        _over_axis(drawing, found, _training, _training_title(found)),
        _speedups(drawing, found),
        _parts(drawing, timings),
        _losses(drawing, found),
    ]
    return [figure for figure in drawn if figure is not None]


def _rate(result: CellResult) -> Interval | None:
    return result.samples_per_s


def _training(result: CellResult) -> Interval | None:
    return None if result.training_s is None else Interval(result.training_s)


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
        chart = batch_chart(data)
        return drawing.render(chart, f"{title} over the global batch", note, line_legend(data))
    over = "devices" if data.x_axis == "devices" else "plans"
    names = data.values(data.colour) if data.colour else []
    legend = mark_legend(names, cycle_colours(SERIES, len(names)), "square")
    return drawing.render(bar_chart(data), f"{title} over {over}", legend=legend)


def _speedups(drawing: FigureRenderer, found: Sequence[CellResult]) -> Figure | None:
    data = chart_data.speedup_lines(found)
    if data is None:
        return None
    chart = speedup_chart(data, ideal=max(row["x"] for row in data.rows))
    note = "Relative to one device under the same plan."
    return drawing.render(chart, "speedup over devices", note, line_legend(data))


def _parts(drawing: FigureRenderer, timings: Sequence[PartTiming]) -> Figure | None:
    if not timings:
        return None
    colours = part_colours(timings)
    legend = mark_legend(list(colours), list(colours.values()), "circle")
    return drawing.render(parts_chart(timings), "parts of the operation [ms]", "", legend)


def _losses(drawing: FigureRenderer, found: Sequence[CellResult]) -> Figure | None:
    data = chart_data.loss_lines(found)
    if data is None:
        return None
    note = "Mean over ranks, one line per cell. Lines of equal batch should coincide."
    chart = loss_chart(data)
    return drawing.render(chart, "training loss over samples seen", note, line_legend(data))


def telemetry_figures(
    section: ReportSection, watched: TelemetryRun, prefix: str
) -> tuple[str, list[Figure]]:
    """Draw the telemetry of one run; return its name and a figure per quantity.

    The loads of devices and host share one figure if both were sampled.
    """
    drawing = FigureRenderer(prefix)
    csv, measurement = Path(watched.csv), watched.measurement
    span = chart_data.timed_span(csv, measurement)
    loads = chart_data.read_load_panels(csv, _share(measurement))
    shown = {loads.devices.spec.columns, loads.host.spec.columns} if loads else set()
    drawn = [_loads(drawing, loads, span, LOAD_TITLE)] if loads else []
    others = [panel for panel in chart_data.read_panels(csv) if panel.spec.columns not in shown]
    drawn += [_panel(drawing, panel, span) for panel in others]
    return _name(section, measurement), drawn


LOAD_TITLE = "load of the devices and of the host"


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
            measurement, csv = watched.measurement, Path(watched.csv)
            loads = chart_data.read_load_panels(csv, _share(measurement))
            if loads is not None:
                title = f"{section.workload}: {_name(section, measurement)}"
                span = chart_data.timed_span(csv, measurement)
                made.append(_loads(drawing, loads, span, terminal_safe(title)))
    return made


MAX_LOAD_FIGURES = 24  # per page


def _name(section: ReportSection, measurement: Measurement) -> str:
    differing = dict.fromkeys(["devices", "batch", *cell_labels.varying_axes(section.cells)])
    return terminal_safe(cell_labels.cell_label(measurement, tuple(differing)))


def _share(measurement: Measurement) -> int | None:
    plan = measurement.plan
    return plan.cores_per_device if plan.device == "cpu" else None


def _loads(
    drawing: FigureRenderer, loads: LoadPanels, span: tuple[float, float] | None, title: str
) -> Figure:
    names = loads.devices.lines
    legend = stroke_legend(names, time_line_colours(names))
    return drawing.render(load_chart(loads, span), title, "", legend)


def _panel(
    drawing: FigureRenderer, panel: TelemetryPanel, span: tuple[float, float] | None
) -> Figure:
    legend = stroke_legend(panel.lines, time_line_colours(panel.lines))
    return drawing.render(time_chart(panel, span), panel.spec.title, "", legend)


ROW_HEIGHT = 34
LOAD_WIDTH, LOAD_HEIGHT = 350, 90


def batch_chart(data: FigureData) -> Any:
    """Draw lines over the batch, on a log2 scale; a cross on the axis is a failed cell."""
    batches = sorted({row["x"] for row in (*data.rows, *data.failed)})
    scale = alt.Scale(
        type="log", base=2, domain=[batches[0] / 1.15, batches[-1] * 1.15], nice=False
    )
    axis = alt.Axis(values=batches, format=",d", grid=False, labelOverlap=True)
    x = alt.X("x:Q", title="global batch", scale=scale, axis=axis)
    top = 1.08 * max(row["high"] for row in data.rows)
    chart = line_chart(data, x=x, top=top)
    if not data.failed:
        return apply_size_and_style(chart)
    failed = base_chart(data.failed)
    crosses = failed.mark_point(shape=CROSS_PATH, size=60, strokeWidth=2, filled=False, clip=False)
    direct = uses_direct_labels(data)
    colour = line_encodings(data)["color"]
    place = crosses.encode(x=with_label_room(x) if direct else x, y=alt.datum(0), color=colour)
    return apply_size_and_style(alt.layer(chart, place))


CROSS_PATH = "M-.7,-.7L.7,.7M-.7,.7L.7,-.7"


def speedup_chart(data: FigureData, ideal: int) -> Any:
    """Draw the speedup over devices, with the ideal line."""
    counts = sorted({row["x"] for row in data.rows})
    top = 1.05 * max(ideal, max(row["high"] for row in data.rows))
    axis = alt.Axis(values=counts, format="d", grid=False)
    scale = alt.Scale(domain=[min(counts) - 0.04 * ideal, ideal], nice=False)
    x = alt.X("x:Q", title="devices", scale=scale, axis=axis)
    chart = line_chart(data, x=x, top=top)
    place = with_label_room(x) if uses_direct_labels(data) else x
    ends = [{"x": 1, "y": 1}, {"x": ideal, "y": ideal}]
    line = base_chart(ends).mark_line(strokeDash=[3, 3], strokeWidth=1.2, color=MUTED)
    middle = (1 + 2 * ideal) / 3
    name = base_chart([{"x": middle, "y": middle, "name": "ideal"}])
    text = name.mark_text(align="right", dx=-12, dy=-6, color=MUTED).encode(text="name:N")
    both = [layer.encode(x=place, y=zero_based_axis(top)) for layer in (line, text)]
    return apply_size_and_style(alt.layer(*both, chart))


def bar_chart(data: FigureData, texts: str = "text") -> Any:
    """Draw one bar per category with its value; ``texts`` is the key of the label."""
    rows = [{**row, texts: format_number(row["y"])} for row in data.rows]
    rows += [{**row, "y": 0, "low": 0, "high": 0, texts: row["status"]} for row in data.failed]
    names = list(dict.fromkeys(row["x"] for row in rows))
    top = 1.3 * max(row["high"] for row in rows)
    axis = alt.Axis(ticks=False, domain=False, labelLimit=170, labelColor=TEXT)
    base = base_chart(rows).encode(
        y=alt.Y("x:N", title=None, sort=names, axis=axis),
        x=alt.X("y:Q", title=None, axis=None, scale=alt.Scale(domain=[0, top], nice=False)),
        **_grouped(data),
    )
    drawn = base.mark_bar(height={"band": 0.72}, opacity=0.9).encode(
        color=line_encodings(data)["color"]
    )
    errors = base.mark_rule(color=TEXT, strokeWidth=1.2).encode(x="low:Q", x2="high:Q")
    named = base.mark_text(align="left", dx=6, color=TEXT).encode(x="high:Q", text=f"{texts}:N")
    groups = len(data.values(data.colour)) if data.colour else 1
    height = 40 + 30 * len(names) * groups
    return apply_size_and_style(alt.layer(drawn, errors, named), height=height)


def _grouped(data: FigureData) -> dict[str, Any]:
    return {"yOffset": alt.YOffset(f"{data.colour}:N")} if data.colour else {}


def loss_chart(data: FigureData) -> Any:
    """Draw the loss over samples."""
    top = 1.05 * max(row["y"] for row in data.rows)
    axis = alt.Axis(labelExpr=AXIS_LABEL_FORMAT, tickCount=5, grid=False)
    x = alt.X("x:Q", title="samples seen", axis=axis, scale=alt.Scale(nice=False))
    return apply_size_and_style(line_chart(data, x=x, top=top, error_bars=False))


def time_line_colours(names: Sequence[str]) -> list[str]:
    """Return colours of lines over time; grey is for baselines."""
    return cycle_colours(SERIES[1:], len(names))


def part_colours(timings: Sequence[PartTiming]) -> dict[str, str]:
    """Return the colour of each column of parts; baselines are grey."""
    devices = list(dict.fromkeys(t.column for t in timings if not t.baseline))
    others = {t.column: SERIES[0] for t in timings if t.baseline}
    return {**dict(zip(devices, cycle_colours(SERIES[1:], len(devices)), strict=True)), **others}


def time_chart(panel: TelemetryPanel, span: tuple[float, float] | None) -> Any:
    """Draw one quantity over seconds, a line per device, with a band over the timed windows."""
    names = panel.lines
    rows: list[FigureRow] = [{"x": p.seconds, "y": p.value, "line": p.line} for p in panel.points]
    highest = max(row["y"] for row in rows)
    top = panel.spec.top or 1.1 * highest or 1.0
    axis = alt.Axis(tickCount=5, grid=False)
    last = max(row["x"] for row in rows)
    x = alt.X("x:Q", title="seconds", axis=axis, scale=alt.Scale(domain=[0, last or 1], nice=False))
    drawn = (
        base_chart(rows)
        .mark_line(strokeWidth=1.4)
        .encode(
            x=x,
            y=zero_based_axis(top),
            color=colour_encoding("line", names, time_line_colours(names)),
        )
    )
    return apply_size_and_style(alt.layer(*_band(span, x, top), drawn), height=190)


def load_chart(loads: LoadPanels, span: tuple[float, float] | None) -> Any:
    """Draw the load of the devices above the load of the host, over the same seconds, 0 to 100 %.

    A device that waits while the host is busy shows as a gap above a plateau.
    """
    panels = (loads.devices, loads.host)
    last = max(point.seconds for panel in panels for point in panel.points) or 1
    drawn = [_load(panel, span, last, below=panel is loads.host) for panel in panels]
    return apply_style(alt.vconcat(*drawn, spacing=10).resolve_scale(color="independent"))


def _load(
    panel: TelemetryPanel, span: tuple[float, float] | None, last: float, *, below: bool
) -> Any:
    names = panel.lines
    top = max(100.0, *(point.value for point in panel.points))
    axis = alt.Axis(tickCount=5, grid=False, labels=below, ticks=below)
    scale = alt.Scale(domain=[0, last], nice=False)
    x = alt.X("x:Q", title="seconds" if below else None, axis=axis, scale=scale)
    colours = [MUTED] if below else time_line_colours(names)
    rows: list[FigureRow] = [{"x": p.seconds, "y": p.value, "line": p.line} for p in panel.points]
    line = base_chart(rows).mark_line(strokeWidth=1.4)
    drawn = line.encode(x=x, y=zero_based_axis(top), color=colour_encoding("line", names, colours))
    layered = alt.layer(*_band(span, x, top), drawn)
    return layered.properties(width=LOAD_WIDTH, height=LOAD_HEIGHT, title=panel.spec.title)


def _band(span: tuple[float, float] | None, x: Any, top: float) -> list[Any]:
    if span is None:
        return []
    rows = [{"x": span[0], "end": span[1], "y": 0, "y2": top}]
    base = base_chart(rows).encode(x=x, y=zero_based_axis(top))
    return [base.mark_rect(color=BAND).encode(x2="end:Q", y2="y2:Q")]


def parts_chart(timings: Sequence[PartTiming]) -> Any:
    """Draw the milliseconds of every part on a log scale, a dot per device count."""
    rows = [row for timing in timings if (row := _part_row(timing))["low"] > 0]
    names = list(dict.fromkeys(str(row["part"]) for row in rows))
    colours = part_colours(timings)
    y = alt.Y("part:N", sort=names, title=None, axis=None)
    base = base_chart(rows).encode(
        x=_milliseconds(rows),
        y=y,
        color=colour_encoding("column", list(colours), list(colours.values())),
    )
    dots = base.mark_point(filled=True, size=60, opacity=0.95, yOffset=7)
    errors = base.mark_rule(strokeWidth=1.4, yOffset=7, y2Offset=7).encode(x="low:Q", x2="high:Q")
    titles = base_chart([{"part": name} for name in names]).mark_text(
        align="left", baseline="middle", dy=-8, color=TEXT
    )
    named = titles.encode(x=alt.value(2), y=y, text="part:N")
    return apply_size_and_style(alt.layer(errors, dots, named), height=70 + ROW_HEIGHT * len(names))


def _part_row(timing: PartTiming) -> FigureRow:
    ms = timing.ms
    return {
        "part": timing.part,
        "column": timing.column,
        "x": ms.value,
        "low": ms.value if ms.low is None else ms.low,
        "high": ms.value if ms.high is None else ms.high,
    }


def _milliseconds(rows: Sequence[FigureRow]) -> Any:
    ends = [min(row["low"] for row in rows) / 1.6, max(row["high"] for row in rows) * 1.6]
    scale = alt.Scale(type="log", domain=ends, nice=False)
    axis = alt.Axis(format="~g", tickCount=5, labelOverlap=True)
    return alt.X("x:Q", title="milliseconds, logarithmic", scale=scale, axis=axis)
