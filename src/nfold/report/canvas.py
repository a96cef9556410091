"""What every figure is drawn on: its size, its type, its axes, and lines with their names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import altair as alt

from nfold.report.ink import (
    DASHES,
    FONT,
    FONT_SIZE,
    GRID,
    HEIGHT,
    MUTED,
    SERIES,
    SHAPES,
    WIDTH,
    cycle_colours,
)
from nfold.report.legend import shape_names, uses_direct_labels
from nfold.report.points import FigureData, FigureRow

LABEL_WIDTH = 84
"""Pixels on the right for the names of lines."""
MIN_LABEL_GAP = 0.075
"""Least distance of two names, as a fraction of the axis."""
AXIS_LABEL_FORMAT = "datum.value >= 1000 ? format(datum.value, '~s') : format(datum.value, '~g')"
"""Labels of an axis: ``20k`` from a thousand on, plain digits below."""


def base_chart(rows: Sequence[FigureRow]) -> Any:
    """An empty chart of these rows."""
    data: Any = alt.Data
    return alt.Chart(data(values=list(rows)))


def apply_size_and_style(chart: Any, height: int = HEIGHT) -> Any:
    """The chart at the size and in the type of all figures."""
    fitted = alt.AutoSizeParams(type="fit", contains="padding")
    return apply_style(chart.properties(width=WIDTH, height=height, autosize=fitted))


def apply_style(chart: Any) -> Any:
    """The chart in the type and the greys of all figures."""
    return (
        chart.properties(background="transparent")
        .configure(font=FONT, aria=False, padding={"left": 2, "right": 4, "top": 6, "bottom": 2})
        .configure_view(stroke=None)
        .configure_title(
            anchor="start", color=MUTED, fontSize=FONT_SIZE, fontWeight="normal", offset=6
        )
        .configure_axis(
            labelColor=MUTED,
            titleColor=MUTED,
            gridColor=GRID,
            domainColor=GRID,
            tickColor=GRID,
            labelFontSize=FONT_SIZE,
            titleFontSize=FONT_SIZE,
            titleFontWeight="normal",
            labelPadding=4,
            titlePadding=6,
        )
        .configure_text(font=FONT, fontSize=FONT_SIZE)
    )


def line_chart(data: FigureData, *, x: Any, top: float, error_bars: bool = True) -> Any:
    """Lines with points and error bars, named at their ends where they are few."""
    rows = list(data.rows)
    direct = uses_direct_labels(data)
    place = with_label_room(x) if direct else x
    base = base_chart(rows).encode(x=place, y=zero_based_axis(top), **line_encodings(data))
    layers = [base.mark_line(strokeWidth=2, strokeJoin="round")]
    if error_bars:
        layers.append(base.mark_rule(strokeWidth=1.2).encode(y="low:Q", y2="high:Q"))
        layers.append(base.mark_point(filled=True, size=42, opacity=1).encode(**_shape(data)))
    if direct:
        layers.append(_names(data, x, top))
    return alt.layer(*layers)


def zero_based_axis(top: float) -> Any:
    """The y axis from zero to ``top``."""
    axis = alt.Axis(labelExpr=AXIS_LABEL_FORMAT, tickCount=5, domain=False, ticks=False)
    return alt.Y("y:Q", title=None, axis=axis, scale=alt.Scale(domain=[0, top], nice=False))


def with_label_room(x: Any) -> Any:
    """The x axis with room on its right for the names of lines."""
    scale = x.scale.to_dict() if hasattr(x.scale, "to_dict") else {}
    place = {"range": [0, {"expr": f"width - {LABEL_WIDTH}"}]}
    made = x.copy()
    made.scale = alt.Scale(**{**scale, **place})
    return made


def line_encodings(data: FigureData) -> dict[str, Any]:
    """Colour and dashes of lines; one colour where nothing tells them apart."""
    found: dict[str, Any] = {"color": alt.value(SERIES[1])}
    if data.colour is not None:
        names = data.values(data.colour)
        found["color"] = colour_encoding(data.colour, names, cycle_colours(SERIES, len(names)))
    if data.dash is not None:
        names = data.values(data.dash)
        dashes = [list(DASHES[k % len(DASHES)]) for k in range(len(names))]
        scale = alt.Scale(domain=names, range=dashes)
        found["strokeDash"] = alt.StrokeDash(f"{data.dash}:N", scale=scale, legend=None)
    apart_by = [key for key in ("line", data.shape) if key and data.rows and key in data.rows[0]]
    if apart_by:
        found["detail"] = [f"{key}:N" for key in apart_by]
    return found


def colour_encoding(key: str, names: Sequence[str], colours: Sequence[str]) -> Any:
    """The colour of each name."""
    scale = alt.Scale(domain=list(names), range=list(colours))
    return alt.Color(f"{key}:N", scale=scale, legend=None)


def _shape(data: FigureData) -> dict[str, Any]:
    """Points keep their solid outline; their shape tells the strategies apart."""
    found: dict[str, Any] = {"strokeDash": alt.value([1, 0])}
    if data.shape is not None:
        names = shape_names(data)
        scale = alt.Scale(domain=names, range=cycle_colours(SHAPES, len(names)))
        found["shape"] = alt.Shape(f"{data.shape}:N", scale=scale, legend=None)
    return found


def _names(data: FigureData, x: Any, top: float) -> Any:
    """The name of every line at its last point, moved apart where they would overlap."""
    ends: dict[str, FigureRow] = {}
    for row in data.rows:
        name = row[str(data.colour)]
        if name not in ends or row["x"] >= ends[name]["x"]:
            ends[name] = row
    heights = spread_values([row["y"] for row in ends.values()], MIN_LABEL_GAP * top)
    placed = [{**row, "y": y} for row, y in zip(ends.values(), heights, strict=True)]
    texts = base_chart(placed).mark_text(align="left", dx=8, baseline="middle")
    colour = line_encodings(data)["color"]
    return texts.encode(
        x=with_label_room(x), y=zero_based_axis(top), color=colour, text=f"{data.colour}:N"
    )


def spread_values(values: Sequence[float], gap: float) -> list[float]:
    """The values moved as little as it takes, upwards, so that none is closer than ``gap``."""
    order = sorted(range(len(values)), key=lambda k: values[k])
    moved = list(values)
    for below, above in pairwise(order):
        moved[above] = max(moved[above], moved[below] + gap)
    return moved
