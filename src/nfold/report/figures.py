"""The figures of a section, drawn: each an SVG with its title and what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfold.inert import inert
from nfold.report import axes, charts, points, series, svg
from nfold.report.ink import SERIES, cycle
from nfold.report.legend import Entry, of_lines, of_marks, of_strokes
from nfold.report.parts import Timing
from nfold.report.query import Section, Watched
from nfold.report.results import Result
from nfold.report.series import Panel
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
    """What the devices did during one run: its name, and a figure for each quantity."""
    drawing = Drawing(prefix)
    measurement = watched.measurement
    differing = dict.fromkeys(["devices", "batch", *axes.varying(section.cells)])
    name = inert(axes.label(measurement, tuple(differing)))
    span = series.timed_span(watched.csv, measurement)
    return name, [_panel(drawing, panel, span) for panel in series.panels(Path(watched.csv))]


def _panel(drawing: Drawing, panel: Panel, span: tuple[float, float] | None) -> Figure:
    legend = of_strokes(panel.lines, charts.time_colours(panel.lines))
    return drawing.figure(charts.over_time(panel, span), panel.kind.title, "", legend)
