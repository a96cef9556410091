"""The colours of figures, in light and dark, and the size that every figure has.

Series: Okabe and Ito's palette, told apart with any colour vision, after a grey for what the
others are compared with. A figure is drawn once, in the light colours; the page's style sheet
exchanges them for the dark ones where the reader prefers those.
"""

from __future__ import annotations

from collections.abc import Sequence

TEXT = "#3a3a40"
MUTED = "#6f6f78"
GRID = "#e3e3e8"
BAND = "#ececf0"
PAPER = "#ffffff"

SERIES = ("#75757f", "#0072b2", "#d55e00", "#009e73", "#b5589a", "#8a6d00", "#3a9bd1", "#7a4fb0")

DARK_COLOURS = {
    TEXT: "#d6d6dc",
    MUTED: "#9b9ba6",
    GRID: "#34343c",
    BAND: "#2a2a31",
    PAPER: "#17171b",
    SERIES[0]: "#a3a3ae",
    SERIES[1]: "#56b4e9",
    SERIES[2]: "#f0873f",
    SERIES[3]: "#2fc59a",
    SERIES[4]: "#dd93c6",
    SERIES[5]: "#d3b33a",
    SERIES[6]: "#8fd0f5",
    SERIES[7]: "#b394e0",
}
"""Every colour of a figure and what it becomes on a dark page."""

DASHES = ((1, 0), (5, 3), (1.5, 2.5), (8, 3, 1.5, 3), (3, 1.5), (10, 4))
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")

WIDTH = 400
HEIGHT = 250
FONT = "Helvetica, Arial, sans-serif"
FONT_SIZE = 12


def cycle_colours(colours: Sequence[str], many: int) -> list[str]:
    """As many colours as there are series, from the first on again where they do not last."""
    return [colours[k % len(colours)] for k in range(many)]
