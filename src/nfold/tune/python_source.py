"""A Python file as text and syntax tree, and changes of it that are checked against the tree."""

from __future__ import annotations

import ast
import bisect
import codecs
import copy
import io
import re
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

NODE = TypeVar("NODE", bound=ast.AST)
LINE_END = re.compile(rb"\r\n|\r|\n")
LAYOUT_TOKENS = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
# deep nesting ends in one of the last two
PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class RefusedEdit(Exception):
    """An edit that is not made, with the reason in plain words."""


class Splice(NamedTuple):
    """Replace the bytes from ``start`` to ``end`` by ``text``."""

    start: int
    end: int
    text: bytes


class Token(NamedTuple):
    """A token, from the offset ``start`` to ``end``."""

    kind: int
    text: str
    start: int
    end: int

    @property
    def is_layout(self) -> bool:
        return self.kind in LAYOUT_TOKENS


@dataclass(frozen=True)
class Position:
    """The line of an edit, from 1, and the offset of its column, None if no column is known."""

    line: int
    offset: int | None = None


class SourceLines:
    """A text as bytes of UTF-8, and its lines as Python counts them, from 1."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._ends = [found.end() for found in LINE_END.finditer(text)]
        self._starts = [0, *self._ends]

    @property
    def line_count(self) -> int:
        return len(self._starts)

    def line_start(self, line: int) -> int:
        return self._starts[line - 1]

    def line_end(self, line: int) -> int:
        """Return the offset of the end of a line, before its line break."""
        return self.line_start(line) + len(self.line(line))

    def next_line(self, line: int) -> int:
        """Return the offset after the line break of a line."""
        return self._ends[line - 1] if line <= len(self._ends) else len(self.text)

    def line(self, line: int) -> bytes:
        """Return a line without its line break."""
        return self.text[self.line_start(line) : self.next_line(line)].rstrip(b"\r\n")

    def line_at(self, offset: int) -> int:
        return bisect.bisect_right(self._starts, offset)

    def line_break(self, line: int) -> bytes:
        """Return the line break of a line, or of the first line if it is the last."""
        for end_of in (line, 1):
            if end_of <= len(self._ends):
                found = LINE_END.search(self.text, self.line_start(end_of))
                return found[0] if found else b"\n"
        return b"\n"

    def indentation(self, line: int) -> bytes:
        found = re.match(rb"[ \t\f]*", self.line(line))
        return found[0] if found else b""


class PythonSource(SourceLines):
    """A Python file. Offsets count bytes of its text in UTF-8, without a byte order mark.

    Raises:
        RefusedEdit: if the content is no Python source that can be written back byte for byte.
    """

    def __init__(self, content: bytes, origin_lines: tuple[int, ...] | None = None) -> None:
        self.content = content
        self._mark = codecs.BOM_UTF8 if content.startswith(codecs.BOM_UTF8) else b""
        try:
            name, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            self.encoding = "utf-8" if name == "utf-8-sig" else name
            text = content[len(self._mark) :].decode(self.encoding)
            if self._mark + text.encode(self.encoding) != content:
                raise RefusedEdit(f"its encoding {self.encoding} cannot be written back unchanged")
        except (SyntaxError, LookupError, UnicodeError) as error:
            raise RefusedEdit(f"it is not text in the encoding that it names: {error}") from error
        super().__init__(text.encode())
        self.tree = _parse(text)
        self._origin_lines = origin_lines or tuple(range(1, len(self._starts) + 1))

    def start(self, node: Any) -> int:
        """Return the offset of a node; of a decorated function, that of its first decorator."""
        decorators = getattr(node, "decorator_list", None)
        if decorators:  # the offset of "@", before which there are only spaces
            return self.text.rindex(b"@", 0, self.start(decorators[0]))
        return self.line_start(node.lineno) + int(node.col_offset)

    def end(self, node: Any) -> int:
        return self.line_start(node.end_lineno) + int(node.end_col_offset)

    def code(self, node: Any) -> str:
        return self.text[self.start(node) : self.end(node)].decode()

    def origin_line(self, node: Any) -> int:
        """Return the line of a node in the file before all edits."""
        line: int = node.lineno
        return self._origin_lines[line - 1]

    @cached_property
    def tokens(self) -> tuple[Token, ...]:
        lines = [self.line(number).decode() for number in range(1, self.line_count + 1)]
        read = iter([line + "\n" for line in lines[:-1]] + lines[-1:])

        def offset(place: tuple[int, int]) -> int:
            line, column = place
            if line > self.line_count:
                return len(self.text)
            return self.line_start(line) + len(lines[line - 1][:column].encode())

        try:
            found = list(tokenize.generate_tokens(lambda: next(read, "")))
        except (tokenize.TokenError, SyntaxError) as error:
            raise RefusedEdit(f"it cannot be divided into tokens: {error}") from error
        return tuple(Token(t.type, t.string, offset(t.start), offset(t.end)) for t in found)

    def tokens_between(self, start: int, end: int) -> tuple[Token, ...]:
        return tuple(token for token in self.tokens if start <= token.start and token.end <= end)

    @property
    def comments(self) -> list[str]:
        return [token.text for token in self.tokens if token.kind == tokenize.COMMENT]

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the innermost first."""
        parent = self.parent(node)
        while parent is not None:
            yield parent
            parent = self.parent(parent)

    def scope(self, node: ast.AST) -> Scope:
        """Return the function, class or module around a node."""
        return next(each for each in self.ancestors(node) if isinstance(each, Scope))

    def spliced(self, splices: list[Splice]) -> PythonSource:
        """Return the source with all splices made.

        Raises:
            RefusedEdit: if the result is no Python.
        """
        parts, origins, at = [], [], 0
        for splice in sorted(splices, key=lambda each: (each.start, each.end)):
            parts += [self.text[at : splice.start], splice.text]
            at = splice.end
        text = b"".join([*parts, self.text[at:]])
        try:
            content = self._mark + text.decode().encode(self.encoding)
        except UnicodeError as error:
            raise RefusedEdit(f"its encoding {self.encoding} has no such character") from error
        for start in [0, *(found.end() for found in LINE_END.finditer(text))]:
            origins.append(self._origin_lines[self.line_at(_offset_before(start, splices)) - 1])
        return PythonSource(content, tuple(origins))


def _parse(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
            compile(text, "<source>", "exec", dont_inherit=True)
    except PARSE_ERRORS as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise RefusedEdit(f"it is not Python{line}: {what}") from error
    return tree


def offset_after(offset: int, splices: list[Splice]) -> int:
    """Return where the text at an offset is after splices; text at an insertion moves behind it."""
    return offset + sum(
        len(each.text) - (each.end - each.start) for each in splices if each.end <= offset
    )


def _offset_before(offset: int, splices: list[Splice]) -> int:
    """Return the offset before splices; inside a new text, the offset where it begins."""
    shift = 0
    for each in sorted(splices, key=lambda splice: (splice.start, splice.end)):
        new_start = each.start + shift
        if offset < new_start + len(each.text):
            return min(offset - shift, each.start)
        shift += len(each.text) - (each.end - each.start)
    return offset - shift


def read_source(path: Path) -> PythonSource:
    """Read a Python file.

    Raises:
        RefusedEdit: if it cannot be read, or is no Python.
    """
    try:
        return PythonSource(path.read_bytes())
    except OSError as error:
        raise RefusedEdit(f"it cannot be read: {error.strerror or error}") from error


class SourceRewrite:
    """One edit of a source: splices of its text, and the same change of a copy of its tree."""

    def __init__(self, source: PythonSource) -> None:
        self.source = source
        self.splices: list[Splice] = []
        self._copies: dict[int, Any] = {}
        self._tree = copy.deepcopy(source.tree, self._copies)

    def copy_of(self, node: NODE) -> NODE:
        """Return the node of the changed tree that was copied from a node of the source."""
        found: NODE = self._copies[id(node)]
        return found

    def insert(self, offset: int, text: bytes) -> None:
        self.replace(offset, offset, text)

    def replace(self, start: int, end: int, text: bytes) -> None:
        self.splices.append(Splice(start, end, text))

    def replace_node(self, old: ast.expr, new: ast.expr) -> None:
        """Replace, in the changed tree, the copy of a node of the source."""
        parent = self.source.parent(old)
        assert parent is not None
        changed, copied = self.copy_of(parent), self.copy_of(old)
        for field, content in ast.iter_fields(changed):
            if content is copied:
                setattr(changed, field, new)
            elif isinstance(content, list):
                content[:] = [new if each is copied else each for each in content]

    def finish(self) -> PythonSource:
        """Return the edited source.

        Raises:
            RefusedEdit: if its tree is not the changed tree, or a comment is lost.
        """
        edited = self.source.spliced(self.splices)
        if ast.dump(edited.tree) != ast.dump(self._tree):
            raise RefusedEdit("the edit would change other code too")
        if edited.comments != self.source.comments:
            raise RefusedEdit("the edit would remove a comment")
        return edited


def parse_expression(code: str) -> ast.expr:
    return ast.parse(code, mode="eval").body


def last_name(node: ast.AST) -> str:
    """Return ``c`` of ``a.b.c`` and of ``c``, "" of other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dotted_name(node: ast.AST) -> str:
    """Return ``a.b.c`` of such an expression, "" of other expressions."""
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""
