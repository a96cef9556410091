"""Edits of a script at lines that its ScriptProfile names, for remedies that users keep.

A line counts only if the script acts there itself: what a trainer or another package does is set
elsewhere. Each function returns None if there is no such line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nfold.core.source_edit import AddStatement, SetKeywords, SourceEdit, WrapExpression

MOVES = ("to", "cuda")  # methods of a module whose lines the profile has


def set_wrapper_arguments(
    profile: Any, arguments: Mapping[str, object]
) -> tuple[SourceEdit, ...] | None:
    """Give every DistributedDataParallel arguments."""
    if profile.parallel != "ddp":
        return None
    return edit_calls(profile, "wrapper", "DistributedDataParallel", arguments)


def edit_calls(
    profile: Any, event: str, function: str, arguments: Mapping[str, object]
) -> tuple[SourceEdit, ...] | None:
    """Give the calls of a function arguments, at all lines of an event."""
    keywords = tuple(
        (name, f'"{value}"' if isinstance(value, str) else repr(value))
        for name, value in arguments.items()
    )
    lines = _own_lines(profile, event)
    edits = [SetKeywords(location=line, function=function, keywords=keywords) for line in lines]
    return tuple(edits) or None


def add_after_model(profile: Any, statement: str) -> tuple[SourceEdit, ...] | None:
    """Add a statement wherever a model is moved to a device; ``{target}`` in it is the model."""
    edits = [
        AddStatement(location=line, statement=statement, imports=_imports(statement))
        for line in _own_lines(profile, "model", before_training=True)
    ]
    return tuple(edits) or None


def add_after_wrapper(
    profile: Any, statement: str, needed_import: str
) -> tuple[SourceEdit, ...] | None:
    """Add a statement after every DistributedDataParallel; ``{assigned}`` in it is its name."""
    if profile.parallel != "ddp":
        return None
    edits = [
        AddStatement(location=line, statement=statement, imports=(needed_import,))
        for line in _own_lines(profile, "wrapper")
    ]
    return tuple(edits) or None


def wrap_moved_model(profile: Any, template: str) -> tuple[SourceEdit, ...] | None:
    """Wrap every expression that moves a model to a device; ``{}`` is the expression."""
    edits = [
        WrapExpression(
            location=line, template=template, functions=MOVES, imports=_imports(template)
        )
        for line in _own_lines(profile, "model", before_training=True)
    ]
    return tuple(edits) or None


def add_before_model(profile: Any, statement: str) -> tuple[SourceEdit, ...] | None:
    """Add a statement before the first model is moved to a device, or a trainer gets it."""
    for event in ("model", "trainer", "wrapper"):
        for line in _own_lines(profile, event, before_training=True):
            edit = AddStatement(
                location=line, statement=statement, place="before", imports=_imports(statement)
            )
            return (edit,)
    return None


def edit_lines(
    profile: Any, event: str, edit: Callable[..., SourceEdit]
) -> tuple[SourceEdit, ...] | None:
    """Make the same edit at all lines of an event."""
    return tuple(edit(location=line) for line in _own_lines(profile, event)) or None


def _imports(statement: str) -> tuple[str, ...]:
    return ("import torch",) if "torch." in statement else ()


def _own_lines(profile: Any, event: str, *, before_training: bool = False) -> list[str]:
    """Return the lines of an event; with ``before_training``, those that no step executes."""
    return [
        found.line
        for found in profile.source_locations.get(event, ())
        if found.package_line is None and not (before_training and found.per_step)
    ]
