"""The project's words: a glossary, and retired words that appear nowhere.

Retired words were a private dialect. A word here has one meaning, and a thing has one word; the
terms are in docs/glossary.md.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY_TERMS = 60
RETIRED_NAMES = frozenset(
    (
        "rung",
        "rungs",
        "ladder",
        "sights",
        "making",
        "maker",
        "doubt",
        "doubts",
        "turn",
        "turns",
        "ablation",
        "ablations",
        "ablate",
        "lifeline",
        "whereabouts",
        "standin",
        "stand_in",
        "stand_ins",
        "left_out",
        "given_again",
        "first_look",
        "unwaited",
        "unexchanged",
        "beside",
        "amounts",
        "landing",
        "stretch",
        "asked",
    )
)
"""Words and word pairs that no identifier contains, split at underscores and case changes."""
RETIRED_PHRASES = re.compile(
    r"\b(rungs?|ladders?|sights|makers?|doubts?|ablations?|lifelines?|whereabouts|first looks?"
    r"|left out|leaves? out|leaving out|given again|gives? again|in turns|takes? turns|(?:a|its|each|their|"
    r"every|of) turns?|in no row|unexchanged|unwaited|stands? in for|stood in for)\b",
    re.IGNORECASE,
)
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "benchmarks/*.md",
             "benchmarks/diagnosis/**/*.md", "examples/**/*.md")  # fmt: skip
STORED = {
    "core/serialization.py": "the table of stored names",
    "engines/simulated/simulation.py": "the text that seeds the noise, the same in every version",
}
"""Files that contain retired words on purpose, with the reason."""


def words(identifier: str) -> set[str]:
    """Return the words of an identifier, and its pairs of neighbours."""
    parts = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", identifier)
    small = [part.lower() for part in parts]
    return {*small, *("_".join(pair) for pair in pairwise(small))}


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of everything that a module defines or binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the strings and comments of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            for number, line in enumerate(token.string.splitlines()):
                yield token.start[0] + number, line


def sources() -> Iterator[tuple[str, Path]]:
    for file in sorted((ROOT / "src" / "nfold").rglob("*.py")):
        place = file.relative_to(ROOT / "src" / "nfold").as_posix()
        if place not in STORED:
            yield place, file


def test_no_identifier_has_a_retired_word() -> None:
    found = [
        f"{place}:{line}: {name}"
        for place, file in sources()
        for line, name in identifiers(ast.parse(file.read_text()))
        if words(name) & RETIRED_NAMES
    ]
    assert found == []


def test_no_file_name_has_a_retired_word() -> None:
    names = [place for place, _ in sources()]
    assert [name for name in names if words(name.replace("/", "_")) & RETIRED_NAMES] == []


def test_no_message_or_comment_has_a_retired_word() -> None:
    found = [
        f"{place}:{line}: {text.strip()}"
        for place, file in sources()
        for line, text in texts(file.read_text())
        if RETIRED_PHRASES.search(text)
    ]
    assert found == []


def test_no_document_has_a_retired_word() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for pattern in DOCUMENTS
        for file in sorted(ROOT.glob(pattern))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if RETIRED_PHRASES.search(line)
    ]
    assert found == []


def test_the_glossary_is_short() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert 20 < len(terms) <= GLOSSARY_TERMS + 1


def test_retired_words_are_found() -> None:
    assert words("left_out_of") & RETIRED_NAMES
    assert words("ClimbLadder") & RETIRED_NAMES
    assert not words("return_value") & RETIRED_NAMES
    assert RETIRED_PHRASES.search("variants take turns in one run")
    assert not RETIRED_PHRASES.search("turn it off")
