"""Colours, size, legends and axes of all figures.

The palette is Okabe and Ito's, safe for colour-blind readers, after a grey for baselines. A figure is
drawn once in light colours; the style sheet of the page replaces them on dark screens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import altair as alt
import vl_convert

from nfold.core.plan import ALLOWED_VALUES
from nfold.report.chart_data import FigureData, FigureRow

TEXT = "#3a3a40"
MUTED = "#6f6f78"
GRID = "#e3e3e8"
BAND = "#ececf0"
PAPER = "#ffffff"

SERIES = ("#75757f", "#0072b2", "#d55e00", "#009e73", "#b5589a", "#8a6d00", "#3a9bd1", "#7a4fb0")

DARK = ("#a3a3ae", "#56b4e9", "#f0873f", "#2fc59a", "#dd93c6", "#d3b33a", "#8fd0f5", "#b394e0")
# every light colour and its replacement on a dark page
DARK_COLOURS = {
    TEXT: "#d6d6dc",
    MUTED: "#9b9ba6",
    GRID: "#34343c",
    BAND: "#2a2a31",
    PAPER: "#17171b",
    **dict(zip(SERIES, DARK, strict=True)),
}

DASHES = ((1, 0), (5, 3), (1.5, 2.5), (8, 3, 1.5, 3), (3, 1.5), (10, 4))

WIDTH = 400
HEIGHT = 250
FONT = "Helvetica, Arial, sans-serif"
FONT_SIZE = 12


def cycle_colours(colours: Sequence[str], many: int) -> list[str]:
    """Return ``many`` colours, repeating if there are too few."""
    return [colours[k % len(colours)] for k in range(many)]


# The page draws legends, not Vega: they wrap on a narrow screen, and screen readers read them.
MAX_DIRECT_LABELS = 6  # more lines, or lines of several kinds, get a legend

SHAPE_PATHS = {
    "circle": "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",
    "square": "M-3.5,-3.5h7v7h-7Z",
    "triangle-up": "M0,-4.5L4.3,3.2H-4.3Z",
    "diamond": "M0,-5L4,0L0,5L-4,0Z",
    "cross": "M-1.5,-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3Z",
    "triangle-down": "M0,4.5L4.3,-3.2H-4.3Z",
}


@dataclass(frozen=True, kw_only=True)
class LegendEntry:
    """A line with its dashes, or a mark: ``path`` is an SVG path around (0, 0)."""

    label: str
    colour: str = MUTED
    dash: str = ""
    path: str = ""


def uses_direct_labels(data: FigureData) -> bool:
    """Return whether lines are labelled at their ends: a few, distinguished by colour alone."""
    named = data.colour is not None and data.dash is None and data.shape is None
    return named and len(data.values(str(data.colour))) <= MAX_DIRECT_LABELS


def line_legend(data: FigureData) -> tuple[LegendEntry, ...]:
    """Return the legend of lines without direct labels: colours, then dashes, then shapes."""
    if uses_direct_labels(data):
        return ()
    coloured = data.values(data.colour) if data.colour else []
    colours = zip(coloured, cycle_colours(SERIES, len(coloured)), strict=True)
    dashed = enumerate(data.values(data.dash) if data.dash else [])
    shapes = zip(shape_names(data), SHAPE_PATHS.values(), strict=False)
    return (
        *(LegendEntry(label=name, colour=colour) for name, colour in colours),
        *(LegendEntry(label=name, dash=" ".join(map(str, _dash(k)))) for k, name in dashed),
        *(LegendEntry(label=name, path=path) for name, path in shapes if name != "single"),
    )


def _dash(number: int) -> list[float]:
    return list(DASHES[number % len(DASHES)])


def shape_names(data: FigureData) -> list[str]:
    """Return the strategies in the order of their shapes, the same in every figure."""
    found = set(data.values(data.shape)) if data.shape else set()
    return [name for name in ALLOWED_VALUES["strategy"] if name == "single" or name in found]


def colour_legend(
    names: Sequence[str], colours: Sequence[str], shape: str | None = None
) -> tuple[LegendEntry, ...]:
    """Return the legend of marks of one shape, or of solid lines; empty for a single one."""
    path = SHAPE_PATHS[shape] if shape else ""
    pairs = zip(names, colours, strict=True)
    entries = [LegendEntry(label=name, colour=colour, path=path) for name, colour in pairs]
    return tuple(entries) if len(entries) > 1 else ()


LABEL_WIDTH = 84  # pixels on the right for the names of lines
MIN_LABEL_GAP = 0.075  # minimum distance of two names, as a fraction of the axis
# ``20k`` from a thousand on, digits below
AXIS_LABEL_FORMAT = "datum.value >= 1000 ? format(datum.value, '~s') : format(datum.value, '~g')"


def base_chart(rows: Sequence[FigureRow]) -> Any:
    data: Any = alt.Data
    return alt.Chart(data(values=list(rows)))


def apply_size_and_style(chart: Any, height: int = HEIGHT, width: int = WIDTH) -> Any:
    """Return the chart with the size and style of all figures."""
    fitted = alt.AutoSizeParams(type="fit", contains="padding")
    return apply_style(chart.properties(width=width, height=height, autosize=fitted))


def apply_style(chart: Any) -> Any:
    """Return the chart with the fonts and greys of all figures."""
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
    """Return lines with points and error bars, labelled at their ends if they are few."""
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
    axis = alt.Axis(labelExpr=AXIS_LABEL_FORMAT, tickCount=5, domain=False, ticks=False)
    return alt.Y("y:Q", title=None, axis=axis, scale=alt.Scale(domain=[0, top], nice=False))


def with_label_room(x: Any) -> Any:
    """Return the x axis with room on its right for the names of lines."""
    scale = x.scale.to_dict() if hasattr(x.scale, "to_dict") else {}
    place = {"range": [0, {"expr": f"width - {LABEL_WIDTH}"}]}
    made = x.copy()
    made.scale = alt.Scale(**{**scale, **place})
    return made


def line_encodings(data: FigureData) -> dict[str, Any]:
    found: dict[str, Any] = {"color": alt.value(SERIES[1])}
    if data.colour is not None:
        names = data.values(data.colour)
        found["color"] = colour_encoding(data.colour, names, cycle_colours(SERIES, len(names)))
    if data.dash is not None:
        names = data.values(data.dash)
        dashes = [_dash(k) for k in range(len(names))]
        scale = alt.Scale(domain=names, range=dashes)
        found["strokeDash"] = alt.StrokeDash(f"{data.dash}:N", scale=scale, legend=None)
    apart_by = [key for key in ("line", data.shape) if key and data.rows and key in data.rows[0]]
    if apart_by:
        found["detail"] = [f"{key}:N" for key in apart_by]
    return found


def colour_encoding(key: str, names: Sequence[str], colours: Sequence[str]) -> Any:
    scale = alt.Scale(domain=list(names), range=list(colours))
    return alt.Color(f"{key}:N", scale=scale, legend=None)


def _shape(data: FigureData) -> dict[str, Any]:
    found: dict[str, Any] = {"strokeDash": alt.value([1, 0])}
    if data.shape is not None:
        names = shape_names(data)
        scale = alt.Scale(domain=names, range=cycle_colours([*SHAPE_PATHS], len(names)))
        found["shape"] = alt.Shape(f"{data.shape}:N", scale=scale, legend=None)
    return found


def _names(data: FigureData, x: Any, top: float) -> Any:
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
    """Move values upwards as little as possible until none is closer than ``gap``."""
    order = sorted(range(len(values)), key=lambda k: values[k])
    moved = list(values)
    for below, above in pairwise(order):
        moved[above] = max(moved[above], moved[below] + gap)
    return moved


SVG_NAMESPACE = "http://www.w3.org/2000/svg"
# other elements are removed
ALLOWED_ELEMENTS = frozenset(
    {"svg", "g", "path", "rect", "line", "text", "tspan", "title", "defs", "clipPath"}
)
DROPPED_ATTRIBUTES = frozenset(
    {"style", "class", "role", "pointer-events", "width", "height", "version"}
)


def render_svg(chart: Any, *, name: str, description: str) -> str:
    """Return the chart as an SVG element.

    ``name`` makes its ids unique on the page; ``description`` is for screen readers. Only known
    elements and attributes are kept, whatever text the data contains.
    """
    drawn = vl_convert.vegalite_to_svg(chart.to_dict(validate=False))
    root = ElementTree.fromstring(drawn)  # noqa: S314  # our own drawing, not a stranger's file
    _clean(root, name)
    root.set("role", "img")
    root.set("aria-label", description)
    ElementTree.register_namespace("", SVG_NAMESPACE)
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element, name: str) -> None:
    dropped = DROPPED_ATTRIBUTES - ({"width", "height"} if _local(element.tag) == "rect" else set())
    for key, value in list(element.attrib.items()):
        if key in dropped or key.startswith(("on", "aria-", "{")) or key == "href":
            del element.attrib[key]
        elif key == "id":
            element.set(key, f"{name}-{value}")
        else:
            element.set(key, value.replace("url(#", f"url(#{name}-"))
    for child in list(element):
        if _local(child.tag) in ALLOWED_ELEMENTS:
            _clean(child, name)
        else:
            element.remove(child)


def _local(tag: str) -> str:
    return tag.removeprefix(f"{{{SVG_NAMESPACE}}}")
