"""Wrappers put in place of functions and methods of PyTorch's, and taken away again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PatchFactory = Callable[[Any], Any]
"""From what stood there to what stands there now."""


class Patches:
    """Attributes that were replaced, in order."""

    def __init__(self) -> None:
        self._undo_stack: list[tuple[Any, str, Any, bool]] = []

    def put(self, owner: Any, name: str, factory: PatchFactory) -> None:
        """Replace an attribute of a class or module; one that does not exist is left alone."""
        before = getattr(owner, name, None)
        if before is None:
            return
        self._undo_stack.append((owner, name, before, name in vars(owner)))
        setattr(owner, name, factory(before))

    def undo(self) -> None:
        """Put everything back, the last first; what a class inherits it inherits again."""
        while self._undo_stack:
            owner, name, before, own = self._undo_stack.pop()
            if own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)
