"""One explanation as Markdown."""

from __future__ import annotations

from nfold.budget import Budget
from nfold.report import explanation
from nfold.report.markdown import escape_markdown, pipe_table
from nfold.sentences import write_conclusion


def explanation_markdown(budget: Budget) -> str:
    """What the terminal shows, and the runs that prove each row."""
    tables = [
        text
        for head, rows in explanation.cost_tables(budget)
        for text in (
            f"### {escape_markdown(head)}",
            pipe_table(explanation.COST_HEADS, rows, explanation.NUMERIC_HEADS),
        )
    ]
    blocks = [
        f"## {escape_markdown(explanation.explanation_title(budget))}",
        escape_markdown(budget.headline),
        *(f"**Wrong training: {escape_markdown(text)}**" for text in budget.training_errors),
        f"**{escape_markdown(' '.join(write_conclusion(budget)))}**",
        pipe_table(explanation.SPEED_HEADS, explanation.speed_rows(budget)),
        *tables,
        "\n".join(f"- {escape_markdown(note)}" for note in explanation.explanation_notes(budget)),
        "### Runs",
        "\n".join(
            f"- {cause}: {escape_markdown(ids)}" for cause, ids in explanation.run_ids(budget)
        ),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"
