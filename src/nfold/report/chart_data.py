"""The data of every figure as rows; None if a figure has nothing to show."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from nfold.analysis import cell_labels
from nfold.analysis.cells import Cell
from nfold.analysis.comparison import CellResult, strong_or_weak_comparisons
from nfold.core.format import STATUS_LABELS, pluralize, terminal_safe
from nfold.core.measurement import Measurement
from nfold.core.stats import Interval

FigureRow = dict[str, Any]
MAX_LOSS_POINTS = 150


@dataclass(frozen=True, kw_only=True)
class FigureData:
    """Rows of a figure, with the keys ``x``, ``y``, ``low``, ``high`` and those of their series.

    ``x_axis`` is ``batch`` (a number), ``devices`` or ``variant`` (categories). ``colour``, ``dash`` and
    ``shape`` name the keys that distinguish lines, or are None. ``failed`` rows have a ``status``
    instead of ``y``.
    """

    rows: tuple[FigureRow, ...]
    x_axis: str
    colour: str | None = None
    dash: str | None = None
    shape: str | None = None
    failed: tuple[FigureRow, ...] = ()

    def values(self, key: str) -> list[Any]:
        """Return the distinct values of a key, in order."""
        return list(dict.fromkeys(row[key] for row in (*self.rows, *self.failed)))


def _place(cell: Cell, variant: Sequence[str]) -> FigureRow:
    first = cell.first
    return {
        "devices": pluralize(first.plan.devices or 1, "device"),
        "count": first.plan.devices or 1,
        "batch": first.plan.batch or 0,
        "batch_name": f"batch {first.plan.batch}",
        "variant": terminal_safe(cell_labels.cell_label(first, variant)),
        "strategy": first.plan.strategy or "",
    }


def lines_over_axis(
    found: Sequence[CellResult], number: Callable[[CellResult], Interval | None]
) -> FigureData | None:
    """Return a number over the batch, or over devices or variants if there is one batch."""
    cells = [result.cell for result in found]
    variant = cell_labels.secondary_axes(cells)
    places = [(result, _place(result.cell, variant)) for result in found]
    rows = [{**place, **_value(value)} for r, place in places if (value := number(r))]
    failed = [
        {**p, "status": STATUS_LABELS[r.cell.first_failed_or_first.status]}
        for r, p in places
        if not r.succeeded
    ]
    across = _across([place for _, place in places])
    if across is None or not rows:
        return None
    for row in (*rows, *failed):
        row["x"] = row[across]
    series = _series(rows + failed, across)
    rows.sort(key=lambda row: (row["count"], row["variant"], row["batch"]))
    return FigureData(rows=tuple(rows), x_axis=across, failed=tuple(failed), **series)


def _value(interval: Interval) -> FigureRow:
    low, high = interval.low, interval.high
    return {
        "y": interval.value,
        "low": interval.value if low is None else low,
        "high": interval.value if high is None else high,
    }


def _across(places: Sequence[FigureRow]) -> str | None:
    for axis in ("batch", "devices", "variant"):
        if len({place[axis] for place in places}) > 1:
            return axis
    return None


def _series(rows: Sequence[FigureRow], across: str) -> dict[str, str | None]:
    def varies(key: str) -> bool:
        return key != across and len({row[key] for row in rows}) > 1

    several = {row["strategy"] for row in rows if row["count"] > 1}
    shape = "strategy" if len(several) > 1 else None
    if varies("devices"):
        return {
            "colour": "devices",
            "dash": "variant" if varies("variant") else None,
            "shape": shape,
        }
    return {"colour": "variant" if varies("variant") else None, "dash": None, "shape": shape}


def speedup_lines(found: Sequence[CellResult]) -> FigureData | None:
    """Return the speedup over devices, a line per batch and variant that begins at 1."""
    cells = [result.cell for result in found]
    variant = cell_labels.secondary_axes(cells)
    rows: list[FigureRow] = []
    for result in strong_or_weak_comparisons(found):
        if result.comparison is not None:
            place = _place(result.cell, variant)
            rows.append({**place, "x": place["count"], **_value(result.comparison.speedup)})
    if not rows:
        return None
    ones = {(r["batch"], r["variant"], r["strategy"]): r for r in reversed(rows)}
    rows += [{**row, "x": 1, "y": 1.0, "low": 1.0, "high": 1.0} for row in ones.values()]
    rows.sort(key=lambda row: (row["batch"], row["variant"], row["strategy"], row["x"]))
    several = {row["strategy"] for row in rows}
    by_batch = len({row["batch"] for row in rows}) > 1
    by_variant = len({row["variant"] for row in rows}) > 1
    return FigureData(
        rows=tuple(rows),
        x_axis="devices",
        colour="batch_name" if by_batch else "variant" if by_variant else None,
        dash="variant" if by_batch and by_variant else None,
        shape="strategy" if len(several) > 1 else None,
    )


def loss_lines(found: Sequence[CellResult]) -> FigureData | None:
    """Return the training loss over samples, a line per cell, of its last successful repeat."""
    cells = [result.cell for result in found]
    variant = cell_labels.secondary_axes(cells)
    rows = [
        {**_place(result.cell, (*variant, "strategy")), **point}
        for result in sorted(found, key=lambda r: (r.batch, r.devices))
        for point in _loss_line(result.cell)
    ]
    if not rows:
        return None
    by_batch = len({row["batch"] for row in rows}) > 1
    by_devices = len({row["devices"] for row in rows}) > 1
    return FigureData(
        rows=tuple(rows),
        x_axis="samples",
        colour="batch_name" if by_batch else "devices" if by_devices else None,
        dash="devices" if by_batch and by_devices else None,
    )


def _loss_line(cell: Cell) -> list[FigureRow]:
    with_losses = [m for m in cell.measurements if any(rank.losses for rank in m.ranks)]
    if not with_losses:
        return []
    chosen = ([m for m in with_losses if m.status == "ok"] or with_losses)[-1]
    batch = cell.first.plan.batch or 1
    pairs = [(step * batch, loss) for step, loss in _mean_losses(chosen)]
    line = cell.first.cell
    return [{"x": x, "y": y, "line": line} for x, y in thin_points(pairs, MAX_LOSS_POINTS)]


def _mean_losses(measurement: Measurement) -> list[tuple[int, float]]:
    losses = [dict(rank.losses) for rank in measurement.ranks if rank.losses]
    steps = sorted(set.intersection(*(set(one) for one in losses)))
    means = [(step, fmean(one[step] for one in losses)) for step in steps]
    return [(step, mean) for step, mean in means if math.isfinite(mean)]


# Telemetry as lines over time: which panels a machine gives, thinned out to what a figure shows.
#
# The columns are those of the sampler; an empty cell is a value that the device does not say.

MAX_POINTS = 240  # per line, about one per two pixels


@dataclass(frozen=True, kw_only=True)
class PanelSpec:
    """A panel: a pattern of columns (group 1 names the line) and their unit."""

    title: str
    columns: str
    line: str
    factor: float = 1.0
    top: float | None = None  # end of the axis, if the quantity has a maximum


@dataclass(frozen=True, kw_only=True)
class SeriesPoint:
    """One value of one line; ``seconds`` from the start of the telemetry."""

    line: str
    seconds: float
    value: float


@dataclass(frozen=True, kw_only=True)
class TelemetryPanel:
    """The lines of one quantity."""

    spec: PanelSpec
    points: tuple[SeriesPoint, ...]

    @property
    def lines(self) -> list[str]:
        """The names of the lines."""
        return list(dict.fromkeys(point.line for point in self.points))


GPU_PANELS = (
    PanelSpec(
        title="GPU utilisation [%]", columns=r"gpu(\d+)_utilisation_percent", line="GPU", top=100
    ),
    PanelSpec(
        title="GPU memory [GiB]", columns=r"gpu(\d+)_memory_used_bytes", line="GPU", factor=2**-30
    ),
    PanelSpec(title="GPU power [W]", columns=r"gpu(\d+)_power_w", line="GPU"),
)
HOST_PANELS = (PanelSpec(title="host CPU [%]", columns=r"(host)_cpu_percent", line="", top=100),)
RANK_SHARE_TITLE = "CPU device, its rank and loader workers [% of its cores]"
RANK_PANELS = (
    PanelSpec(
        title="CPU of each rank [% of a core]", columns=r"rank(\d+)_cpu_percent", line="rank"
    ),
    PanelSpec(
        title="memory of each rank [GiB]",
        columns=r"rank(\d+)_rss_bytes",
        line="rank",
        factor=2**-30,
    ),
)


def read_panels(path: Path) -> list[TelemetryPanel]:
    """Return the panels of a telemetry file: GPUs and host, or host and ranks."""
    rows = _rows(path)
    times = [row.get("monotonic_s") for row in rows]
    start = min((time for time in times if time is not None), default=0.0)
    gpus = [panel for kind in GPU_PANELS if (panel := _panel(kind, rows, start)).points]
    others = HOST_PANELS if gpus else (*HOST_PANELS, *RANK_PANELS)
    return [*gpus, *(panel for kind in others if (panel := _panel(kind, rows, start)).points)]


@dataclass(frozen=True, kw_only=True)
class LoadPanels:
    """The load of the devices and of the cores of the host, in %."""

    devices: TelemetryPanel
    host: TelemetryPanel


def read_load_panels(path: Path, cores_per_device: int | None = None) -> LoadPanels | None:
    """Return the load of the devices and of the host, or None if one is missing.

    The load of a CPU device is the load of its rank with the loader workers, in % of the device's
    ``cores_per_device`` cores.
    """
    rows = _rows(path)
    times = [row.get("monotonic_s") for row in rows]
    start = min((time for time in times if time is not None), default=0.0)
    ranks = replace(RANK_PANELS[0], title=RANK_SHARE_TITLE, factor=1 / (cores_per_device or 1))
    devices = next(
        (p for kind in (GPU_PANELS[0], ranks) if (p := _panel(kind, rows, start)).points), None
    )
    host = _panel(HOST_PANELS[0], rows, start)
    return LoadPanels(devices=devices, host=host) if devices and host.points else None


def timed_span(path: Path, measurement: Measurement) -> tuple[float, float] | None:
    """Return the seconds from the start of the telemetry between which windows were timed."""
    windows = [window for rank in measurement.ranks for window in rank.windows]
    times = [t for row in _rows(path) if (t := row.get("monotonic_s")) is not None]
    if not windows or not times:
        return None
    begin = min(window.start_s for window in windows) - times[0]
    end = max(window.start_s + window.seconds for window in windows) - times[0]
    last = times[-1] - times[0]
    return (max(0.0, begin), min(end, last)) if begin < last and end > 0 else None


def _rows(path: Path) -> list[dict[str, float | None]]:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        return [{k: _number(v) for k, v in row.items() if k} for row in csv.DictReader(file)]


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _panel(
    kind: PanelSpec, rows: Sequence[dict[str, float | None]], start: float
) -> TelemetryPanel:
    names = [name for name in (rows[0] if rows else {}) if re.fullmatch(kind.columns, name)]
    points = [point for name in names for point in _line(kind, name, rows, start)]
    return TelemetryPanel(spec=kind, points=tuple(points))


def _line(
    kind: PanelSpec, column: str, rows: Sequence[dict[str, float | None]], start: float
) -> list[SeriesPoint]:
    match = re.fullmatch(kind.columns, column)
    assert match is not None
    name = f"{kind.line} {match[1]}".strip()
    pairs = [(row.get("monotonic_s"), row.get(column)) for row in rows]
    known = [(t - start, v * kind.factor) for t, v in pairs if t is not None and v is not None]
    return [SeriesPoint(line=name, seconds=t, value=v) for t, v in thin_points(known)]


def thin_points(
    points: Sequence[tuple[float, float]], most: int = MAX_POINTS
) -> list[tuple[float, float]]:
    """Return at most ``most`` points, each a mean over neighbours."""
    if len(points) <= most:
        return list(points)
    edges = [k * len(points) // most for k in range(most + 1)]
    groups = [points[a:b] for a, b in pairwise(edges)]
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]
