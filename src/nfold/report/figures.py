"""The figures of a section, drawn: each an SVG with its title and what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfold.inert import inert
from nfold.measurement import Measurement
from nfold.report import axes, charts, points, series, svg
from nfold.report.ink import SERIES, cycle
from nfold.report.legend import Entry, of_lines, of_marks, of_strokes
from nfold.report.parts import Timing
from nfold.report.query import Section, Watched, watched_of
from nfold.report.results import Result
from nfold.report.series import Loads, Panel
from nfold.stats import Interval

CROSSES = "A cross on the axis is a cell without a result."


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawn chart; ``svg`` is safe to stand in a page as it is."""

    title: str
    svg: str
    note: str = ""
    legend: tuple[Entry, ...] = ()


@dataclass
class Drawing:
    """Draws the figures of one section, each under a name of its own."""

    prefix: str
    count: int = 0

    def figure(
        self, chart: Any, title: str, note: str = "", legend: tuple[Entry, ...] = ()
    ) -> Figure:
        """One figure."""
        self.count += 1
        name = f"{self.prefix}-{self.count}"
        drawn = svg.render(chart, name=name, description=f"{title}. {note}".strip())
        return Figure(title=title, note=note, svg=drawn, legend=legend)


def figures(section: Section, timings: Sequence[Timing], prefix: str) -> list[Figure]:
    """Throughput, training time, speedup, an operation's parts and losses, as far as there are."""
    drawing = Drawing(prefix)
    found = section.results
    made = [
        _over_axis(drawing, found, _rate, "images/s"),
        _over_axis(drawing, found, _training, _training_title(found)),
        _speedups(drawing, found),
        _parts(drawing, timings),
        _losses(drawing, found),
    ]
    return [figure for figure in made if figure is not None]


def _rate(result: Result) -> Interval | None:
    return result.samples_per_s


def _training(result: Result) -> Interval | None:
    return None if result.training_s is None else Interval(result.training_s)


def _training_title(found: Sequence[Result]) -> str:
    epochs = sorted({r.plan.epochs for r in found if r.plan.epochs})
    length = f" of {epochs[0]} epochs" if len(epochs) == 1 else ""
    return f"training time{length.replace('1 epochs', '1 epoch')} [s]"


def _over_axis(drawing: Drawing, found: Sequence[Result], number: Any, title: str) -> Figure | None:
    data = points.over_axis(found, number)
    if data is None:
        return None
    if data.across == "batch":
        note = CROSSES if data.failed else ""
        chart = charts.over_batch(data)
        return drawing.figure(chart, f"{title} over the global batch", note, of_lines(data))
    over = "devices" if data.across == "devices" else "plans"
    names = data.values(data.colour) if data.colour else []
    legend = of_marks(names, cycle(SERIES, len(names)), "square")
    return drawing.figure(charts.bars(data), f"{title} over {over}", legend=legend)


def _speedups(drawing: Drawing, found: Sequence[Result]) -> Figure | None:
    data = points.speedups(found)
    if data is None:
        return None
    chart = charts.over_devices(data, ideal=max(row["x"] for row in data.rows))
    note = "Against one device under the same plan; ideal: N devices are N-fold."
    return drawing.figure(chart, "speedup over devices", note, of_lines(data))


def _parts(drawing: Drawing, timings: Sequence[Timing]) -> Figure | None:
    if not timings:
        return None
    colours = charts.part_colours(timings)
    legend = of_marks(list(colours), list(colours.values()), "circle")
    return drawing.figure(charts.parts(timings), "parts of the operation [ms]", "", legend)


def _losses(drawing: Drawing, found: Sequence[Result]) -> Figure | None:
    data = points.losses(found)
    if data is None:
        return None
    note = "Mean over ranks, one line a cell. Lines of the same batch should lie on each other."
    chart = charts.loss_curves(data)
    return drawing.figure(chart, "training loss over samples seen", note, of_lines(data))


def over_time(section: Section, watched: Watched, prefix: str) -> tuple[str, list[Figure]]:
    """What the devices did during one run: its name, and a figure for each quantity.

    The load of the devices and that of the host are one figure, where there are both.
    """
    drawing = Drawing(prefix)
    csv, measurement = Path(watched.csv), watched.measurement
    span = series.timed_span(csv, measurement)
    loads = series.loads(csv, _share(measurement))
    told = {loads.devices.kind.columns, loads.host.kind.columns} if loads else set()
    made = [_loads(drawing, loads, span, LOAD_TITLE)] if loads else []
    others = [panel for panel in series.panels(csv) if panel.kind.columns not in told]
    made += [_panel(drawing, panel, span) for panel in others]
    return _name(section, measurement), made


LOAD_TITLE = "load of the devices and of the host"


def loads_of(sections: Sequence[Section], results_folder: Path, prefix: str) -> list[Figure]:
    """The loads during the latest run of every cell that kept any, the first ``MOST_LOADS``."""
    drawing, made = Drawing(prefix), list[Figure]()
    for section in sections:
        for result in section.results:
            watched = watched_of(result.cell, results_folder)
            if watched is None or len(made) == MOST_LOADS:
                continue
            measurement, csv = watched.measurement, Path(watched.csv)
            loads = series.loads(csv, _share(measurement))
            if loads is not None:
                title = f"{section.workload}: {_name(section, measurement)}"
                span = series.timed_span(csv, measurement)
                made.append(_loads(drawing, loads, span, inert(title)))
    return made


MOST_LOADS = 24
"""Figures of loads on one page."""


def _name(section: Section, measurement: Measurement) -> str:
    """A run among those of its section."""
    differing = dict.fromkeys(["devices", "batch", *axes.varying(section.cells)])
    return inert(axes.label(measurement, tuple(differing)))


def _share(measurement: Measurement) -> int | None:
    plan = measurement.plan
    return plan.cores_per_device if plan.device == "cpu" else None


def _loads(drawing: Drawing, loads: Loads, span: tuple[float, float] | None, title: str) -> Figure:
    names = loads.devices.lines
    legend = of_strokes(names, charts.time_colours(names))
    return drawing.figure(charts.side_by_side(loads, span), title, "", legend)


def _panel(drawing: Drawing, panel: Panel, span: tuple[float, float] | None) -> Figure:
    legend = of_strokes(panel.lines, charts.time_colours(panel.lines))
    return drawing.figure(charts.over_time(panel, span), panel.kind.title, "", legend)
