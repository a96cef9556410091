"""One explanation as Markdown."""

from __future__ import annotations

from nfold.budget import Budget
from nfold.report import explanation
from nfold.report.markdown import escaped, pipe_table
from nfold.sentences import sentences


def document(budget: Budget) -> str:
    """What the terminal shows, and the runs that prove each row."""
    tables = [
        text
        for head, rows in explanation.blocks(budget)
        for text in (
            f"### {escaped(head)}",
            pipe_table(explanation.HEADS, rows, explanation.NUMBERS),
        )
    ]
    blocks = [
        f"## {escaped(explanation.title(budget))}",
        escaped(budget.headline),
        *(f"**Wrong training: {escaped(text)}**" for text in budget.wrong),
        f"**{escaped(' '.join(sentences(budget)))}**",
        pipe_table(explanation.SPEED_HEADS, explanation.speeds(budget)),
        *tables,
        "\n".join(f"- {escaped(note)}" for note in explanation.notes(budget)),
        "### Runs",
        "\n".join(f"- {cause}: {escaped(ids)}" for cause, ids in explanation.runs(budget)),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"
