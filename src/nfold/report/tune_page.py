"""The HTML page of a tuning: conclusion, waterfall from the original to the result, what was tried."""

from __future__ import annotations

from markupsafe import Markup

from nfold import __version__
from nfold.report.chart_elements import MUTED, SERIES, TEXT
from nfold.report.explanation_page import waterfall_figure
from nfold.report.figures import Figure, FigureRenderer
from nfold.report.html_page import content_security_policy, load_style_sheet, load_template
from nfold.report.tune_content import TuneBar, TunePageContent

COLOURS = {"step": TEXT, "remedy": SERIES[1], "difference": MUTED, "left": SERIES[2]}


def tune_page(content: TunePageContent) -> str:
    """The page: one file, no script, nothing fetched."""
    style = load_style_sheet()
    return load_template("tune.html.j2").render(
        content=content,
        figures=[_figure(content.bars)] if content.bars else [],
        style=Markup(style),  # noqa: S704  # our own file and colours
        policy=content_security_policy(style),
        version=__version__,
    )


def _figure(bars: tuple[TuneBar, ...]) -> Figure:
    rows = [
        {
            "name": bar.label,
            "colour": COLOURS[bar.kind],
            "text": bar.text,
            "start": bar.start,
            "end": bar.end,
            "low": bar.low,
            "high": bar.high,
        }
        for bar in bars
    ]
    return waterfall_figure(
        FigureRenderer("tune"), rows, "From the original to the result, ms per step"
    )
