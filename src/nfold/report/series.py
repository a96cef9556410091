"""Telemetry as lines over time: which panels a machine gives, thinned out to what a figure shows.

The columns are those of the sampler; an empty cell is a value that the device does not say.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from nfold.measurement import Measurement

MAX_POINTS = 240
"""Points of a line: one for about two pixels."""


@dataclass(frozen=True, kw_only=True)
class PanelSpec:
    """A panel: the columns that belong on it (group 1 names the line), and their unit."""

    title: str
    columns: str
    line: str
    factor: float = 1.0
    top: float | None = None
    """Where the axis ends, where the quantity has an end."""


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
        """The names of its lines."""
        return list(dict.fromkeys(point.line for point in self.points))


GPU_PANELS = (
    PanelSpec(
        title="GPU utilisation [%]", columns=r"gpu(\d+)_utilisation_percent", line="GPU", top=100
    ),
    PanelSpec(
        title="GPU memory [GiB]",
        columns=r"gpu(\d+)_memory_used_bytes",
        line="GPU",
        factor=2**-30,
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
    """The panels that a telemetry file fills: per GPU and the host, or the host and its ranks."""
    rows = _rows(path)
    times = [row.get("monotonic_s") for row in rows]
    start = min((time for time in times if time is not None), default=0.0)
    gpus = [panel for kind in GPU_PANELS if (panel := _panel(kind, rows, start)).points]
    others = HOST_PANELS if gpus else (*HOST_PANELS, *RANK_PANELS)
    return [*gpus, *(panel for kind in others if (panel := _panel(kind, rows, start)).points)]


@dataclass(frozen=True, kw_only=True)
class LoadPanels:
    """How busy devices and the host's cores were, both in % of what they have."""

    devices: TelemetryPanel
    host: TelemetryPanel


def read_load_panels(path: Path, cores_per_device: int | None = None) -> LoadPanels | None:
    """The load of the devices beside that of the host, None where the file lacks one of them.

    Of CPU devices the load is a rank's with its loader workers, in % of the device's own cores,
    ``cores_per_device``.
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
    """Seconds from the start of the telemetry in which windows were timed, None without any."""
    windows = [window for rank in measurement.ranks for window in rank.windows]
    times = [t for row in _rows(path) if (t := row.get("monotonic_s")) is not None]
    if not windows or not times:
        return None
    begin = min(window.start_s for window in windows) - times[0]
    end = max(window.start_s + window.seconds for window in windows) - times[0]
    last = times[-1] - times[0]
    return (max(0.0, begin), min(end, last)) if begin < last and end > 0 else None


def _rows(path: Path) -> list[dict[str, float | None]]:
    """A row that was cut short when the sampler was killed has fewer values."""
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
    """At most ``most`` points: means over neighbours, so that nothing is picked by chance."""
    if len(points) <= most:
        return list(points)
    edges = [k * len(points) // most for k in range(most + 1)]
    groups = [points[a:b] for a, b in pairwise(edges)]
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]
