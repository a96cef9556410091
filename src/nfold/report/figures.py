"""The figures of a section, drawn: each an SVG with its title and what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfold.inert import terminal_safe
from nfold.measurement import Measurement
from nfold.report import axes, charts, points, series, svg
from nfold.report.ink import SERIES, cycle_colours
from nfold.report.legend import LegendEntry, line_legend, mark_legend, stroke_legend
from nfold.report.parts import PartTiming
from nfold.report.query import ReportSection, TelemetryRun, telemetry_run_of_cell
from nfold.report.results import CellResult
from nfold.report.series import LoadPanels, TelemetryPanel
from nfold.stats import Interval

FAILURE_NOTE = "A cross on the axis is a cell without a result."


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawn chart; ``svg`` is safe to stand in a page as it is."""

    title: str
    svg: str
    note: str = ""
    legend: tuple[LegendEntry, ...] = ()


@dataclass
class FigureRenderer:
    """Draws the figures of one section, each under a name of its own."""

    prefix: str
    count: int = 0

    def render(
        self, chart: Any, title: str, note: str = "", legend: tuple[LegendEntry, ...] = ()
    ) -> Figure:
        """One figure."""
        self.count += 1
        name = f"{self.prefix}-{self.count}"
        drawn = svg.render_svg(chart, name=name, description=f"{title}. {note}".strip())
        return Figure(title=title, note=note, svg=drawn, legend=legend)


def section_figures(
    section: ReportSection, timings: Sequence[PartTiming], prefix: str
) -> list[Figure]:
    """Throughput, training time, speedup, an operation's parts and losses, as far as there are."""
    drawing = FigureRenderer(prefix)
    found = section.results
    made = [
        _over_axis(drawing, found, _rate, "images/s"),
        _over_axis(drawing, found, _training, _training_title(found)),
        _speedups(drawing, found),
        _parts(drawing, timings),
        _losses(drawing, found),
    ]
    return [figure for figure in made if figure is not None]


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
    data = points.lines_over_axis(found, number)
    if data is None:
        return None
    if data.x_axis == "batch":
        note = FAILURE_NOTE if data.failed else ""
        chart = charts.batch_chart(data)
        return drawing.render(chart, f"{title} over the global batch", note, line_legend(data))
    over = "devices" if data.x_axis == "devices" else "plans"
    names = data.values(data.colour) if data.colour else []
    legend = mark_legend(names, cycle_colours(SERIES, len(names)), "square")
    return drawing.render(charts.bar_chart(data), f"{title} over {over}", legend=legend)


def _speedups(drawing: FigureRenderer, found: Sequence[CellResult]) -> Figure | None:
    data = points.speedup_lines(found)
    if data is None:
        return None
    chart = charts.speedup_chart(data, ideal=max(row["x"] for row in data.rows))
    note = "Against one device under the same plan; ideal: N devices are N-fold."
    return drawing.render(chart, "speedup over devices", note, line_legend(data))


def _parts(drawing: FigureRenderer, timings: Sequence[PartTiming]) -> Figure | None:
    if not timings:
        return None
    colours = charts.part_colours(timings)
    legend = mark_legend(list(colours), list(colours.values()), "circle")
    return drawing.render(charts.parts_chart(timings), "parts of the operation [ms]", "", legend)


def _losses(drawing: FigureRenderer, found: Sequence[CellResult]) -> Figure | None:
    data = points.loss_lines(found)
    if data is None:
        return None
    note = "Mean over ranks, one line a cell. Lines of the same batch should lie on each other."
    chart = charts.loss_chart(data)
    return drawing.render(chart, "training loss over samples seen", note, line_legend(data))


def telemetry_figures(
    section: ReportSection, watched: TelemetryRun, prefix: str
) -> tuple[str, list[Figure]]:
    """What the devices did during one run: its name, and a figure for each quantity.

    The load of the devices and that of the host are one figure, where there are both.
    """
    drawing = FigureRenderer(prefix)
    csv, measurement = Path(watched.csv), watched.measurement
    span = series.timed_span(csv, measurement)
    loads = series.read_load_panels(csv, _share(measurement))
    told = {loads.devices.spec.columns, loads.host.spec.columns} if loads else set()
    made = [_loads(drawing, loads, span, LOAD_TITLE)] if loads else []
    others = [panel for panel in series.read_panels(csv) if panel.spec.columns not in told]
    made += [_panel(drawing, panel, span) for panel in others]
    return _name(section, measurement), made


LOAD_TITLE = "load of the devices and of the host"


def load_figures(
    sections: Sequence[ReportSection], results_folder: Path, prefix: str
) -> list[Figure]:
    """The loads during the latest run of every cell that kept any, the first ``MOST_LOADS``."""
    drawing, made = FigureRenderer(prefix), list[Figure]()
    for section in sections:
        for result in section.results:
            watched = telemetry_run_of_cell(result.cell, results_folder)
            if watched is None or len(made) == MAX_LOAD_FIGURES:
                continue
            measurement, csv = watched.measurement, Path(watched.csv)
            loads = series.read_load_panels(csv, _share(measurement))
            if loads is not None:
                title = f"{section.workload}: {_name(section, measurement)}"
                span = series.timed_span(csv, measurement)
                made.append(_loads(drawing, loads, span, terminal_safe(title)))
    return made


MAX_LOAD_FIGURES = 24
"""Figures of loads on one page."""


def _name(section: ReportSection, measurement: Measurement) -> str:
    """A run among those of its section."""
    differing = dict.fromkeys(["devices", "batch", *axes.varying_axes(section.cells)])
    return terminal_safe(axes.cell_label(measurement, tuple(differing)))


def _share(measurement: Measurement) -> int | None:
    plan = measurement.plan
    return plan.cores_per_device if plan.device == "cpu" else None


def _loads(
    drawing: FigureRenderer, loads: LoadPanels, span: tuple[float, float] | None, title: str
) -> Figure:
    names = loads.devices.lines
    legend = stroke_legend(names, charts.time_line_colours(names))
    return drawing.render(charts.load_chart(loads, span), title, "", legend)


def _panel(
    drawing: FigureRenderer, panel: TelemetryPanel, span: tuple[float, float] | None
) -> Figure:
    legend = stroke_legend(panel.lines, charts.time_line_colours(panel.lines))
    return drawing.render(charts.time_chart(panel, span), panel.spec.title, "", legend)
