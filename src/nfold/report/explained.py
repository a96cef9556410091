"""One explanation as a self-contained HTML page."""

from __future__ import annotations

from markupsafe import Markup

from nfold import __version__
from nfold.budget import Budget
from nfold.report import explanation, waterfall
from nfold.report.html import content_security_policy, load_style_sheet, load_template
from nfold.sentences import write_conclusion


def explanation_page(budget: Budget) -> str:
    """The picture, the same tables as in the terminal, and the ids of all runs behind them."""
    style = load_style_sheet()
    return load_template("explain.html.j2").render(
        budget=budget,
        title=explanation.explanation_title(budget),
        sentences=write_conclusion(budget),
        tables=[
            ("", explanation.SPEED_HEADS, explanation.speed_rows(budget)),
            *(
                (head, explanation.COST_HEADS, rows)
                for head, rows in explanation.cost_tables(budget)
            ),
        ],
        runs=explanation.run_ids(budget),
        numbers=explanation.NUMERIC_HEADS,
        notes=explanation.explanation_notes(budget),
        picture=waterfall.waterfall_figure(budget),
        style=Markup(style),  # noqa: S704  # our own file and colours
        policy=content_security_policy(style),
        version=__version__,
    )
