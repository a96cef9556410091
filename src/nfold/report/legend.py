"""What the marks of a figure stand for, as entries that the page writes under its title.

Not the chart's own legend: the page's wraps on a narrow screen and is read out as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nfold.plan import ALLOWED_VALUES
from nfold.report.ink import DASHES, MUTED, SERIES, SHAPES, cycle_colours
from nfold.report.points import FigureData

MAX_DIRECT_LABELS = 6
"""So many lines are named at their ends; more, or of several kinds, get a legend."""

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
    """One entry: a line with its dashes, or a mark with its outline."""

    label: str
    colour: str = MUTED
    dash: str = ""
    path: str = ""
    """Of an SVG path around (0, 0); empty for a line."""


def uses_direct_labels(data: FigureData) -> bool:
    """Whether lines are named at their ends: a few, told apart by colour alone."""
    named = data.colour is not None and data.dash is None and data.shape is None
    return named and len(data.values(str(data.colour))) <= MAX_DIRECT_LABELS


def line_legend(data: FigureData) -> tuple[LegendEntry, ...]:
    """The entries of lines that are not named directly: colours, then dashes, then shapes."""
    if data.colour is None and data.dash is None and data.shape is None:
        return ()
    return () if uses_direct_labels(data) else (*_colours(data), *_dashes(data), *_shapes(data))


def _colours(data: FigureData) -> list[LegendEntry]:
    names = data.values(data.colour) if data.colour else []
    pairs = zip(names, cycle_colours(SERIES, len(names)), strict=True)
    return [LegendEntry(label=name, colour=colour) for name, colour in pairs]


def _dashes(data: FigureData) -> list[LegendEntry]:
    names = data.values(data.dash) if data.dash else []
    return [
        LegendEntry(label=name, dash=" ".join(map(str, DASHES[k % len(DASHES)])))
        for k, name in enumerate(names)
    ]


def _shapes(data: FigureData) -> list[LegendEntry]:
    if data.shape is None:
        return []
    pairs = zip(shape_names(data), SHAPES, strict=False)
    return [
        LegendEntry(label=name, path=SHAPE_PATHS[shape])
        for name, shape in pairs
        if name != "single"
    ]


def shape_names(data: FigureData) -> list[str]:
    """The strategies in the order of their shapes, the same in every figure."""
    found = set(data.values(data.shape)) if data.shape else set()
    return [name for name in ALLOWED_VALUES["strategy"] if name == "single" or name in found]


def mark_legend(
    names: Sequence[str], colours: Sequence[str], shape: str
) -> tuple[LegendEntry, ...]:
    """Entries of marks of one outline in several colours; none for a single one."""
    pairs = zip(names, colours, strict=True)
    entries = [
        LegendEntry(label=name, colour=colour, path=SHAPE_PATHS[shape]) for name, colour in pairs
    ]
    return tuple(entries) if len(entries) > 1 else ()


def stroke_legend(names: Sequence[str], colours: Sequence[str]) -> tuple[LegendEntry, ...]:
    """Entries of solid lines; none for a single one."""
    pairs = zip(names, colours, strict=True)
    entries = [LegendEntry(label=name, colour=colour) for name, colour in pairs]
    return tuple(entries) if len(entries) > 1 else ()
