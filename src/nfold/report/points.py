"""The data of every figure: plain rows, no drawing. None where a figure would say nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from nfold.inert import terminal_safe
from nfold.measurement import Measurement
from nfold.report import axes
from nfold.report.results import CellResult, strong_or_weak_comparisons
from nfold.report.series import thin_points
from nfold.report.words import STATUS_LABELS, pluralize
from nfold.stats import Interval
from nfold.summary import Cell

FigureRow = dict[str, Any]
MAX_LOSS_POINTS = 150


@dataclass(frozen=True, kw_only=True)
class FigureData:
    """Rows of a figure. Keys: ``x``, ``y``, ``low``, ``high``, and the series they belong to.

    ``across`` is what x is: ``batch`` (a number) or ``devices`` or ``variant`` (a category).
    ``colour`` and ``dash`` and ``shape`` name the keys that tell lines apart, None where one
    is all. ``failed`` rows have no y, but a ``status``.
    """

    rows: tuple[FigureRow, ...]
    x_axis: str
    colour: str | None = None
    dash: str | None = None
    shape: str | None = None
    failed: tuple[FigureRow, ...] = ()

    def values(self, key: str) -> list[Any]:
        """The distinct values of a key, in order of the rows."""
        return list(dict.fromkeys(row[key] for row in (*self.rows, *self.failed)))


def _place(cell: Cell, variant: Sequence[str]) -> FigureRow:
    """The series that a cell belongs to."""
    first = cell.first
    return {
        "devices": pluralize(first.plan.devices or 1, "device"),
        "count": first.plan.devices or 1,
        "batch": first.plan.batch or 0,
        "batch_name": f"batch {first.plan.batch}",
        "variant": terminal_safe(axes.cell_label(first, variant)),
        "strategy": first.plan.strategy or "",
    }


def lines_over_axis(
    found: Sequence[CellResult], number: Callable[[CellResult], Interval | None]
) -> FigureData | None:
    """A number over the batch; with one batch over devices; with one of both over variants."""
    cells = [result.cell for result in found]
    variant = axes.secondary_axes(cells)
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
    """Colour for devices, dashes for variants, shapes for strategies, as far as they vary."""

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
    """Speedup over devices, a line per batch and variant, each from its own baseline at one."""
    cells = [result.cell for result in found]
    variant = axes.secondary_axes(cells)
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
    """Training loss over samples seen, a line per cell: its last repeat that has any."""
    cells = [result.cell for result in found]
    variant = axes.secondary_axes(cells)
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
    told = [m for m in cell.measurements if any(rank.losses for rank in m.ranks)]
    if not told:
        return []
    chosen = ([m for m in told if m.status == "ok"] or told)[-1]
    batch = cell.first.plan.batch or 1
    pairs = [(step * batch, loss) for step, loss in _mean_losses(chosen)]
    line = cell.first.cell
    return [{"x": x, "y": y, "line": line} for x, y in thin_points(pairs, MAX_LOSS_POINTS)]


def _mean_losses(measurement: Measurement) -> list[tuple[int, float]]:
    """The mean over ranks at each step that all of them told; not what diverged."""
    told = [dict(rank.losses) for rank in measurement.ranks if rank.losses]
    steps = sorted(set.intersection(*(set(one) for one in told)))
    means = [(step, fmean(one[step] for one in told)) for step in steps]
    return [(step, mean) for step, mean in means if math.isfinite(mean)]
