"""The report as Markdown: sentences and tables, for a pull request or a notebook."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from nfold.inert import inert
from nfold.report import parts, tables
from nfold.report.field.base import FieldReport
from nfold.report.headline import headline
from nfold.report.query import Section
from nfold.report.words import superscript

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&!])")


def document(sections: Sequence[Section], field: FieldReport | None = None) -> str:
    """The field report, if there is one, and all sections: headline, tables and their notes."""
    blocks = [] if field is None else _field_blocks(field)
    blocks += [block for section in sections for block in _blocks(section)]
    return "\n\n".join(blocks) + "\n"


def _field_blocks(field: FieldReport) -> list[str]:
    said = " ".join(field.sentences)
    blocks = [
        f"# {escaped(field.title)}",
        f"**{escaped(said)}**" if said else "",
        f"Then: {escaped(field.then)}.",
    ]
    for sheet in field.sheets:
        notes = "  \n".join(map(escaped, sheet.notes))
        blocks += [f"{escaped(sheet.title)}:", pipe_table(sheet.heads, sheet.texts), notes]
    return [block for block in blocks if block]


def _blocks(section: Section) -> list[str]:
    made = tables.table(section.results)
    timings = parts.timings(section.results)
    in_parts = parts.table(timings)
    machine = escaped(section.machine.summary)
    blocks = [
        f"## {escaped(section.workload)} on {machine}",
        f"**{escaped(' '.join(headline(section.results, timings)))}**",
        f"In all cells: {escaped(tables.shared_text(made.shared))}." if made.shared else "",
        pipe_table(*tables.flat(made)),
        _notes(made.notes),
    ]
    if in_parts is not None:
        blocks += [pipe_table(*parts.flat(in_parts)), _notes(in_parts.notes)]
    return [block for block in blocks if block]


def _notes(notes: Sequence[str]) -> str:
    marked = [f"{superscript((k,))} {escaped(note)}" for k, note in enumerate(notes, start=1)]
    return "  \n".join(marked)


def pipe_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] | None = None
) -> str:
    """A table in GitHub's form, ``numbers`` on the right: all columns but the first unless told."""
    right = heads[1:] if numbers is None else numbers
    rule = ["---:" if head in right else "---" for head in heads]
    lines = [list(map(escaped, heads)), rule, *(list(map(escaped, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    """``text`` as itself: nothing in it is markup, HTML or a line break."""
    return _SPECIAL.sub(r"\\\1", inert(text))
