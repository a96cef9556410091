"""One explanation as a self-contained HTML page."""

from __future__ import annotations

from markupsafe import Markup

from nfold import __version__
from nfold.budget import Budget
from nfold.report import explanation, waterfall
from nfold.report.html import policy, style_sheet, template
from nfold.sentences import sentences


def page(budget: Budget) -> str:
    """The picture, the same tables as in the terminal, and the ids of all runs behind them."""
    style = style_sheet()
    return template("explain.html.j2").render(
        budget=budget,
        title=explanation.title(budget),
        sentences=sentences(budget),
        tables=[
            ("", explanation.SPEED_HEADS, explanation.speeds(budget)),
            *((head, explanation.HEADS, rows) for head, rows in explanation.blocks(budget)),
        ],
        runs=explanation.runs(budget),
        numbers=explanation.NUMBERS,
        notes=explanation.notes(budget),
        picture=waterfall.figure(budget),
        style=Markup(style),  # noqa: S704  # our own file and colours
        policy=policy(style),
        version=__version__,
    )
