"""The screen of ``nfold explain``: the conclusion in at most 25 lines, all tables on request."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nfold.cli import terminal
from nfold.cli.terminal import MIN_WIDTH, Line, wrap_lines
from nfold.core.format import terminal_safe
from nfold.explain.result.budget import Budget, Change
from nfold.explain.result.view import ExplanationView, format_ms, format_percent

if TYPE_CHECKING:
    from nfold.report.explanation import DetailTable

TAG_WIDTH = 9
MAX_BAR, MIN_BAR = 24, 6
TONE_STYLES = {"costly": "bold", "healthy": "bold green", "unknown": "bold", "wrong": "bold red"}


def print_explanation(
    view: ExplanationView,
    budget: Budget,
    *,
    details: bool = False,
    plain: bool = False,
    page: str = "",
) -> None:
    """Print the conclusion; with ``details``, every table. ``page`` is the path of the report."""

    def lines(width: int) -> list[Line]:
        conclusion = conclusion_lines(view, width, page=page, details=details)
        return [*conclusion, *detail_lines(budget, width)] if details else conclusion

    terminal.print_lines(lines, plain=plain)


def conclusion_lines(
    view: ExplanationView, width: int, *, page: str = "", details: bool = False
) -> list[Line]:
    """The default screen. Lines are wrapped at ``width``, never cropped."""
    lines: list[Line] = [*wrap_lines(view.title, width, "dim"), ("", "")]
    lines += wrap_lines(view.headline, width, TONE_STYLES[view.tone])
    for notice in view.notices:
        lines += wrap_lines(notice, width)
    action = _action_lines(view, width)
    if action:
        lines += [("", ""), *action]
    if view.alternatives:
        lines += [("", ""), *_alternative_lines(view.alternatives, width)]
    if view.rows:
        lines += [("", ""), *_account_lines(view, width), ("", "")]
    for text, style in ((view.summary, ""), (view.untested, "dim"), (view.caveats, "dim")):
        lines += wrap_lines(text, width, style)
    tables = "" if details else f"All tables: --details{', ' * bool(page)}{page}"
    ends = [text for text in (view.firmer, tables) if text]
    if sum(map(len, ends)) + 3 <= width:
        ends = ["   ".join(ends)] if ends else []
    for text in ends:
        lines += wrap_lines(text, width, "dim")
    return lines


def _action_lines(view: ExplanationView, width: int) -> list[Line]:
    lines: list[Line] = []
    if view.change is not None:
        lines += _tagged("CHANGE", change_text(view.change), _now(view.change), width, "bold")
    elif view.no_change:
        lines += _tagged("CHANGE", view.no_change, "", width)
    if view.gain:
        lines += _tagged("GAIN", view.gain, view.gain_basis, width, "bold green")
    for change in view.more_changes[:1]:
        lines += _tagged("NEXT", change_text(change), _now(change), width)
    if view.data_set:
        lines += _tagged("DATA SET", view.data_set, "", width)
    if view.before_edit:
        lines += _tagged("BEFORE", view.before_edit, "", width)
    return lines


def change_text(change: Change) -> str:
    """``train.py:31   DataLoader(..., num_workers=4)``."""
    return f"{change.location}   {change.code}" if change.location else change.code


def _now(change: Change) -> str:
    return f"now {change.current}" if change.current else ""


def _tagged(tag: str, text: str, note: str, width: int, style: str = "") -> list[Line]:
    first = f"  {tag:<{TAG_WIDTH}}"
    one = f"{first}{terminal_safe(text)}"
    if note and len(one) + 3 + len(note) <= width:
        column = min(max(len(one) + 3, 62), width - len(note))
        return [(f"{one:<{column}}{note}", style)]
    lines = textwrap.wrap(
        terminal_safe(f"{text}  ({note})" if note else text),
        max(width, MIN_WIDTH),
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    )
    return [(line, style) for line in lines]


def _alternative_lines(rows: Sequence[Sequence[str]], width: int) -> list[Line]:
    """The measured values of a setting, in as many columns as fit."""
    label = max(len(row[0]) for row in rows) + 2
    cell = max(len(text) for row in rows for text in row[1:]) + 3
    fitting = max(1, (width - label - 2) // cell)
    lines = []
    for start in range(1, len(rows[0]), fitting):
        for row in rows:
            numbers = "".join(f"{text:>{cell}}" for text in row[start : start + fitting])
            lines.append((f"  {row[0]:<{label}}{numbers}", ""))
    return lines


def _account_lines(view: ExplanationView, width: int) -> list[Line]:
    names = [row.label for row in view.rows]
    label = max(map(len, [*names, view.account_title])) + 2
    numbers = [format_ms(row.ms.value) for row in view.rows]
    digits = max(len("ms"), *map(len, numbers), len(format_ms(view.step_ms)))
    used = 2 + label + digits + 8
    longest = width - used - 2 - len("  next")
    bar = min(MAX_BAR, longest) if longest >= MIN_BAR else 0
    largest = max((row.fraction for row in view.rows), default=1.0)
    lines = [(f"{view.account_title:<{label + 2}}{'ms':>{digits}}", "bold")]
    for row, number in zip(view.rows, numbers, strict=True):
        text = f"  {row.label:<{label}}{number:>{digits}}{format_percent(row.fraction):>7}"
        if bar and row.fraction > 0:
            text += "  " + "█" * max(1, round(bar * row.fraction / largest))
        lines.append((f"{text.rstrip()}  {row.note}".rstrip(), ""))
    return lines


def detail_lines(budget: Budget, width: int) -> list[Line]:
    """Every table of the explanation, below the conclusion."""
    from nfold.report.explanation import detail_notes, detail_tables

    lines: list[Line] = []
    for table in detail_tables(budget):
        lines += [("", ""), *wrap_lines(table.title, width, "bold"), *_table_lines(table, width)]
    for title, notes in detail_notes(budget):
        lines += [("", ""), (title, "bold")]
        for note in notes:
            lines += wrap_lines(f"  {note}", width, indent="    ")
    return lines


def _table_lines(table: DetailTable, width: int) -> list[Line]:
    """A table whose first or last text column wraps; numbers stay whole."""
    rows = [table.heads, *table.rows]
    columns = range(len(table.heads))
    widths = [max(len(terminal_safe(row[at])) for row in rows) for at in columns]
    texts = [at for at in columns if at not in table.numeric]
    excess = 2 + sum(widths) + 2 * (len(widths) - 1) - width
    for at in reversed(texts):
        if excess > 0:
            least = max(12, len(table.heads[at]))
            cut = min(excess, max(0, widths[at] - least))
            widths[at] -= cut
            excess -= cut
    if excess > 0:
        return _record_lines(table, width)
    lines: list[Line] = []
    for number, row in enumerate(rows):
        cells = [
            textwrap.wrap(terminal_safe(row[at]), widths[at], break_on_hyphens=False) or [""]
            for at in columns
        ]
        for place in range(max(map(len, cells))):
            texts_of_line = [cell[place] if place < len(cell) else "" for cell in cells]
            line = "  ".join(
                f"{text:>{widths[at]}}" if at in table.numeric else f"{text:<{widths[at]}}"
                for at, text in enumerate(texts_of_line)
            )
            lines.append((f"  {line}".rstrip(), "dim" if number == 0 else ""))
    return lines


def _record_lines(table: DetailTable, width: int) -> list[Line]:
    """For a terminal too narrow for the table: one line per cell."""
    lines: list[Line] = []
    for row in table.rows:
        lines += wrap_lines(f"  {row[0]}", width)
        for head, cell in zip(table.heads[1:], row[1:], strict=True):
            if cell:
                lines += wrap_lines(f"    {head}: {cell}", width, indent="      ")
    return lines
