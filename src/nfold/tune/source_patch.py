"""Makes edits of a user's sources a unified diff, which ``git apply`` and ``patch -p1`` accept.

Nothing is written. An edit that cannot be made is a value with its reason.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from nfold.core.source_edit import (
    AddStatement,
    AddUpOnDevice,
    ExchangeOnce,
    FileEdit,
    GuardStatement,
    RemoveStatement,
    ReplaceExpression,
    SetVariable,
    SourceEdit,
)
from nfold.tune.file_edits import edit_source
from nfold.tune.keyword_arguments import CommandValue
from nfold.tune.loop_edits import edit_loop
from nfold.tune.python_source import (
    Position,
    PythonSource,
    RefusedEdit,
    SourceRewrite,
    Splice,
    offset_after,
    read_source,
)
from nfold.tune.statement_edits import edit_statement

LOCATION = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+))?")
NO_NEWLINE = b"\\ No newline at end of file\n"


@dataclass(frozen=True, kw_only=True)
class EditRefusal:
    """An edit that is not made. ``reason`` is a clause about ``location``, in plain words."""

    edit: SourceEdit
    location: str
    reason: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class FlagInstead:
    """A keyword that is not edited because the command line sets it.

    Attributes:
        edit: the edit; none of its keywords is edited.
        keyword: name of the argument, ``num_workers``.
        expression: source that gives its value, ``args.workers``.
        arguments: to append to the command, ``("--workers", "8")`` or ``("loader.workers=8",)``.
        removed: options that the command must not have, ``("--debug",)``.
        caveat: why the keyword may get another value, "" if it does not.
    """

    edit: SourceEdit
    location: str
    keyword: str
    expression: str
    arguments: tuple[str, ...]
    removed: tuple[str, ...] = ()
    caveat: str = ""

    def __str__(self) -> str:
        changes = [f"pass {' '.join(self.arguments)}"] if self.arguments else []
        changes += [f"do not pass {option}" for option in self.removed]
        caveat = f" ({self.caveat})" if self.caveat else ""
        text = f"{self.keyword} is {self.expression}: {' and '.join(changes)}{caveat}"
        return f"{self.location}: {text}"


@dataclass(frozen=True, kw_only=True)
class EditedFile:
    """A file before and after its edits; ``path`` is relative, with slashes."""

    path: str
    original: bytes
    edited: bytes

    @property
    def diff(self) -> bytes:
        """The unified diff of the file, with the prefixes a/ and b/."""
        lines = difflib.diff_bytes(
            difflib.unified_diff,
            _split_lines(self.original),
            _split_lines(self.edited),
            _header_name(f"a/{self.path}"),
            _header_name(f"b/{self.path}"),
        )
        return b"".join(
            line if line.endswith(b"\n") else line + b"\n" + NO_NEWLINE for line in lines
        )


@dataclass(frozen=True, kw_only=True)
class SourcePatch:
    """The edits of a script that were made, and those that were not.

    Attributes:
        files: changed files, in the order of their first edits.
        edits: the edits that were made, in the order in which they were given.
        flags: keywords that the command line sets.
        refusals: edits that were not made.
        variables: environment variables of the command.
    """

    files: tuple[EditedFile, ...] = ()
    edits: tuple[FileEdit, ...] = ()
    flags: tuple[FlagInstead, ...] = ()
    refusals: tuple[EditRefusal, ...] = ()
    variables: tuple[SetVariable, ...] = ()

    @property
    def diff(self) -> bytes:
        """The content of ``nfold.patch``; empty if no file changes."""
        return b"".join(file.diff for file in self.files)


def make_patch(edits: Iterable[SourceEdit], folder: Path) -> SourcePatch:
    """Edit copies of the sources in memory; locations are relative to ``folder``.

    Locations are lines of the files as they are now, ``train.py:31``, or with a column from 1,
    ``train.py:31:12``. Edits of one file are made in the order given; statements after the same
    line keep their order. Each edit is made as a whole or not at all.
    """
    requested = list(edits)
    variables = tuple(each for each in requested if isinstance(each, SetVariable))
    of_files = [each for each in requested if not isinstance(each, SetVariable)]
    later = [each for each in of_files if isinstance(each, AddStatement) and each.place == "after"]
    session = _Session(folder)
    for edit in [each for each in of_files if each not in later]:
        session.make(edit)
    for edit in reversed(later):  # each goes directly behind its line
        session.make(edit)
    return SourcePatch(
        files=tuple(file.result for file in session.files.values() if file.splices),
        edits=tuple(each for each in of_files if each in session.edits),
        flags=tuple(session.flags),
        refusals=tuple(session.refusals),
        variables=variables,
    )


@dataclass
class _File:
    path: str
    original: PythonSource
    source: PythonSource
    splices: list[list[Splice]] = field(default_factory=list)

    def position(self, line: int, column: int | None) -> Position:
        """Return where a position of the original file is now.

        Raises:
            RefusedEdit: if the file has no such line.
        """
        if not 1 <= line <= self.original.line_count:
            raise RefusedEdit("the file has no such line")
        start = offset = self.original.line_start(line)
        if column is not None:
            offset += len(self.original.line(line).decode()[: column - 1].encode())
        for step in self.splices:
            start, offset = offset_after(start, step), offset_after(offset, step)
        return Position(self.source.line_at(start), None if column is None else offset)

    @property
    def result(self) -> EditedFile:
        return EditedFile(
            path=self.path, original=self.original.content, edited=self.source.content
        )


class _Session:
    """Edits of one folder's files, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: dict[str, _File] = {}
        self.edits: list[FileEdit] = []
        self.flags: list[FlagInstead] = []
        self.refusals: list[EditRefusal] = []

    def make(self, edit: FileEdit) -> None:
        try:
            self._make(edit)
        except RefusedEdit as refused:
            reason = str(refused)
        except RecursionError:
            reason = "its code is nested too deeply"
        else:
            return
        self.refusals.append(EditRefusal(edit=edit, location=edit.location, reason=reason))

    def _make(self, edit: FileEdit) -> None:
        place = LOCATION.fullmatch(edit.location)
        if place is None:
            raise RefusedEdit("it is no location FILE:LINE")
        file = self._open(place["file"])
        column = place["column"]
        position = file.position(int(place["line"]), None if column is None else int(column))
        made: SourceRewrite | tuple[CommandValue, ...]
        if isinstance(edit, ReplaceExpression | RemoveStatement | GuardStatement):
            made = edit_statement(file.source, position, edit)
        elif isinstance(edit, ExchangeOnce | AddUpOnDevice):
            made = edit_loop(file.source, position, edit)
        else:
            made = edit_source(file.source, position, edit)
        if isinstance(made, tuple):
            self.flags += [_flag(edit, each) for each in made]
            return
        file.source = made.finish()
        file.splices.append(made.splices)
        self.edits.append(edit)

    def _open(self, name: str) -> _File:
        path = _relative_path(self._folder, name)
        if path not in self.files:
            source = read_source(self._folder / path)
            self.files[path] = _File(path, source, source)
        return self.files[path]


def _flag(edit: SourceEdit, found: CommandValue) -> FlagInstead:
    assert not isinstance(edit, SetVariable)
    return FlagInstead(
        edit=edit,
        location=edit.location,
        keyword=found.keyword,
        expression=found.expression,
        arguments=found.change.arguments,
        removed=found.change.removed,
        caveat=found.change.caveat,
    )


def _relative_path(folder: Path, name: str) -> str:
    """Return the path of a file below a folder.

    Raises:
        RefusedEdit: if a patch of the folder cannot reach it.
    """
    path = folder / name
    if not path.is_file():
        raise RefusedEdit("there is no such file")
    if not path.is_relative_to(folder) or ".." in path.parts:
        raise RefusedEdit(f"the file is not below {folder}")
    relative = path.relative_to(folder)
    for part in (relative, *relative.parents):
        if part != Path() and (folder / part).is_symlink():
            raise RefusedEdit(f"{part} is a symbolic link, which patches do not follow")
    return relative.as_posix()


def _split_lines(content: bytes) -> list[bytes]:
    """Split at line feeds only, as patches do."""
    lines = content.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _header_name(path: str) -> bytes:
    """Return a path as ``git diff`` writes it: quoted, or with a tab behind a name with spaces."""
    raw = path.encode(errors="surrogateescape")
    if any(byte < ord(" ") or byte in b'"\\\x7f' for byte in raw):
        escaped = b"".join(
            b"\\%03o" % byte if byte < ord(" ") or byte in b'"\\\x7f' else bytes([byte])
            for byte in raw
        )
        return b'"' + escaped + b'"'
    return raw + b"\t" if b" " in raw else raw
