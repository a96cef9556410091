"""One explanation as Markdown."""

from __future__ import annotations

from nfold.finding import Budget
from nfold.report import explanation
from nfold.report.markdown import escaped, pipe_table
from nfold.sentences import sentences


def document(budget: Budget) -> str:
    """What the terminal shows, and the runs that prove each row."""
    rows = [*explanation.lines(budget.rows, budget), *explanation.ending(budget)]
    single = explanation.lines(budget.single, budget)
    blocks = [
        f"## {escaped(explanation.title(budget))}",
        escaped(budget.headline),
        *(f"**Wrong training: {escaped(text)}**" for text in budget.wrong),
        f"**{escaped(' '.join(sentences(budget)))}**",
        pipe_table(explanation.SPEED_HEADS, explanation.speeds(budget)),
        f"### {escaped(explanation.lost_head(budget))}",
        pipe_table(explanation.HEADS, rows, explanation.NUMBERS),
        f"### {explanation.single_head(budget)}" if single else "",
        pipe_table(explanation.HEADS, single, explanation.NUMBERS) if single else "",
        "\n".join(f"- {escaped(note)}" for note in explanation.notes(budget)),
        "### Runs",
        "\n".join(f"- {row.cause}: {escaped(', '.join(row.evidence))}" for row in budget.rows),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"
