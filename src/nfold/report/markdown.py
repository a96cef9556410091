"""The report as Markdown: sentences and tables, for a pull request or a notebook."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from nfold.inert import terminal_safe
from nfold.report import parts, tables
from nfold.report.field.base import FieldReport
from nfold.report.headline import headline_sentences
from nfold.report.query import ReportSection
from nfold.report.words import superscript

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&!])")


def report_markdown(sections: Sequence[ReportSection], field: FieldReport | None = None) -> str:
    """The field report, if there is one, and all sections: headline, tables and their notes."""
    blocks = [] if field is None else _field_blocks(field)
    blocks += [block for section in sections for block in _blocks(section)]
    return "\n\n".join(blocks) + "\n"


def _field_blocks(field: FieldReport) -> list[str]:
    said = " ".join(field.sentences)
    blocks = [
        f"# {escape_markdown(field.title)}",
        f"**{escape_markdown(said)}**" if said else "",
        f"Then: {escape_markdown(field.published_setup)}.",
    ]
    for sheet in field.sheets:
        notes = "  \n".join(map(escape_markdown, sheet.notes))
        blocks += [f"{escape_markdown(sheet.title)}:", pipe_table(sheet.heads, sheet.texts), notes]
    return [block for block in blocks if block]


def _blocks(section: ReportSection) -> list[str]:
    made = tables.build_table(section.results)
    timings = parts.part_timings(section.results)
    in_parts = parts.parts_table(timings)
    machine = escape_markdown(section.machine.summary)
    blocks = [
        f"## {escape_markdown(section.workload)} on {machine}",
        f"**{escape_markdown(' '.join(headline_sentences(section.results, timings)))}**",
        f"In all cells: {escape_markdown(tables.shared_text(made.shared))}." if made.shared else "",
        pipe_table(*tables.flatten_table(made)),
        _notes(made.notes),
    ]
    if in_parts is not None:
        blocks += [pipe_table(*parts.flatten_parts_table(in_parts)), _notes(in_parts.notes)]
    return [block for block in blocks if block]


def _notes(notes: Sequence[str]) -> str:
    marked = [
        f"{superscript((k,))} {escape_markdown(note)}" for k, note in enumerate(notes, start=1)
    ]
    return "  \n".join(marked)


def pipe_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] | None = None
) -> str:
    """A table in GitHub's form, ``numbers`` on the right: all columns but the first unless told."""
    right = heads[1:] if numbers is None else numbers
    rule = ["---:" if head in right else "---" for head in heads]
    lines = [
        list(map(escape_markdown, heads)),
        rule,
        *(list(map(escape_markdown, row)) for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escape_markdown(text: str) -> str:
    """``text`` as itself: nothing in it is markup, HTML or a line break."""
    return _SPECIAL.sub(r"\\\1", terminal_safe(text))
