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
    rows = [{**place, **value_and_bounds(value)} for r, place in places if (value := number(r))]
    failed = [
        {**place, "status": STATUS_LABELS[r.cell.first_failed_or_first.status]}
        for r, place in places
        if not r.succeeded
    ]
    all_places = [place for _, place in places]
    across = next((a for a in ("batch", "devices", "variant") if _varies(all_places, a)), None)
    if across is None or not rows:
        return None
    for row in (*rows, *failed):
        row["x"] = row[across]
    rows.sort(key=lambda row: (row["count"], row["variant"], row["batch"]))
    several = [row for row in (*rows, *failed) if row["count"] > 1]
    keys = [key for key in ("devices", "variant") if key != across]
    colour, dash = _styles([*rows, *failed], *keys)
    return FigureData(
        rows=tuple(rows),
        x_axis=across,
        failed=tuple(failed),
        colour=colour,
        dash=dash,
        shape="strategy" if _varies(several, "strategy") else None,
    )


def value_and_bounds(interval: Interval, key: str = "y") -> FigureRow:
    """Return the value under ``key``, and ``low`` and ``high``, by default the value."""
    value, low, high = interval.value, interval.low, interval.high
    return {
        key: value,
        "low": value if low is None else low,
        "high": value if high is None else high,
    }


def _varies(rows: Sequence[FigureRow], key: str) -> bool:
    return len({row[key] for row in rows}) > 1


def _styles(rows: Sequence[FigureRow], *keys: str) -> tuple[str | None, str | None]:
    """Return the first key that varies as colour, the second as dash."""
    colour, dash, *_ = [*(key for key in keys if _varies(rows, key)), None, None]
    return colour, dash


def speedup_lines(found: Sequence[CellResult]) -> FigureData | None:
    """Return the speedup over devices, a line per batch and variant that begins at 1."""
    cells = [result.cell for result in found]
    variant = cell_labels.secondary_axes(cells)
    rows = [
        {**_place(result.cell, variant), "x": result.devices, **value_and_bounds(result.speedup)}
        for result in strong_or_weak_comparisons(found)
        if result.speedup is not None
    ]
    if not rows:
        return None
    ones = {(r["batch"], r["variant"], r["strategy"]): r for r in reversed(rows)}
    rows += [{**row, "x": 1, "y": 1.0, "low": 1.0, "high": 1.0} for row in ones.values()]
    rows.sort(key=lambda row: (row["batch"], row["variant"], row["strategy"], row["x"]))
    shape = "strategy" if _varies(rows, "strategy") else None
    colour, dash = _styles(rows, "batch_name", "variant")
    return FigureData(rows=tuple(rows), x_axis="devices", colour=colour, dash=dash, shape=shape)


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
    colour, dash = _styles(rows, "batch_name", "devices")
    return FigureData(rows=tuple(rows), x_axis="samples", colour=colour, dash=dash)


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


@dataclass(frozen=True)
class PanelSpec:
    """A panel: a pattern of columns (group 1 names the line) and their unit."""

    title: str
    columns: str
    line: str
    factor: float = 1.0
    top: float | None = None  # end of the axis, if the quantity has a maximum


@dataclass(frozen=True)
class TelemetryPanel:
    """The lines of one quantity: ``x`` is in seconds from the start of the telemetry."""

    spec: PanelSpec
    rows: tuple[FigureRow, ...]

    @property
    def lines(self) -> list[str]:
        return list(dict.fromkeys(row["line"] for row in self.rows))


GPU_PANELS = (
    PanelSpec("GPU utilisation [%]", r"gpu(\d+)_utilisation_percent", "GPU", top=100),
    PanelSpec("GPU memory [GiB]", r"gpu(\d+)_memory_used_bytes", "GPU", 2**-30),
    PanelSpec("GPU power [W]", r"gpu(\d+)_power_w", "GPU"),
)
HOST_PANEL = PanelSpec("host CPU [%]", r"(host)_cpu_percent", "", top=100)
RANK_PANELS = (
    PanelSpec("CPU of each rank [% of a core]", r"rank(\d+)_cpu_percent", "rank"),
    PanelSpec("memory of each rank [GiB]", r"rank(\d+)_rss_bytes", "rank", 2**-30),
)
RANK_SHARE_TITLE = "CPU device, its rank and loader workers [% of its cores]"


def read_panels(path: Path) -> list[TelemetryPanel]:
    """Return the panels of a telemetry file: GPUs and host, or host and ranks."""
    rows = _rows(path)
    gpus = _panels(rows, *GPU_PANELS)
    return gpus + _panels(rows, HOST_PANEL, *(() if gpus else RANK_PANELS))


def read_load_panels(
    path: Path, cores_per_device: int | None = None
) -> tuple[TelemetryPanel, TelemetryPanel] | None:
    """Return the load of the devices and of the host in %, or None if one is missing.

    The load of a CPU device is the load of its rank with the loader workers, in % of the device's
    ``cores_per_device`` cores.
    """
    rows = _rows(path)
    ranks = replace(RANK_PANELS[0], title=RANK_SHARE_TITLE, factor=1 / (cores_per_device or 1))
    devices, host = _panels(rows, GPU_PANELS[0], ranks), _panels(rows, HOST_PANEL)
    return (devices[0], host[0]) if devices and host else None


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


def _panels(rows: Sequence[dict[str, float | None]], *specs: PanelSpec) -> list[TelemetryPanel]:
    """Return the panels that have values."""
    times = [row.get("monotonic_s") for row in rows]
    start = min((time for time in times if time is not None), default=0.0)
    panels = []
    for spec in specs:
        points: list[FigureRow] = []
        for column in rows[0] if rows else {}:
            if match := re.fullmatch(spec.columns, column):
                pairs = zip(times, (row.get(column) for row in rows), strict=True)
                known = [
                    (t - start, v * spec.factor)
                    for t, v in pairs
                    if t is not None and v is not None
                ]
                line = f"{spec.line} {match[1]}".strip()
                points += [{"line": line, "x": x, "y": y} for x, y in thin_points(known)]
        if points:
            panels.append(TelemetryPanel(spec, tuple(points)))
    return panels


def thin_points(
    points: Sequence[tuple[float, float]], most: int = MAX_POINTS
) -> list[tuple[float, float]]:
    """Return at most ``most`` points, each a mean over neighbours."""
    if len(points) <= most:
        return list(points)
    edges = [k * len(points) // most for k in range(most + 1)]
    groups = [points[a:b] for a, b in pairwise(edges)]
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]
