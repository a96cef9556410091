"""What is known of a script's objects as long as they are there."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Known(Generic[Value]):
    """Values of objects, by identity: they need no hash, and none is kept for it.

    Python gives the number of one that is gone to another, which nothing is known of. Of a list,
    for one, nobody can tell whether it is gone.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Any] | None, Value]] = {}

    def get(self, of: Any) -> Value | None:
        """Its value, None where it has none."""
        reference, value = self._values.get(id(of), (None, None))
        return value if reference is None or reference() is of else None

    def put(self, of: Any, value: Value) -> None:
        """In the place of what was known of it, or of another with its number."""
        self._values[id(of)] = reference_to(of), value


def reference_to(of: Any) -> weakref.ref[Any] | None:
    """One that does not keep it; None of what has none, such as a list."""
    with suppress(TypeError):
        return weakref.ref(of)
    return None
