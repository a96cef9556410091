"""What is known of a script's objects as long as they are there."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class WeakIdentityDict(Generic[Value]):
    """Values of objects, by identity: they need no hash, and none is kept for it.

    Python gives the number of one that is gone to another, which nothing is known of. Of a list,
    for one, nobody can tell whether it is gone.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Any] | None, Value]] = {}

    def get(self, key: Any) -> Value | None:
        """Its value, None where it has none."""
        reference, value = self._values.get(id(key), (None, None))
        return value if reference is None or reference() is key else None

    def put(self, key: Any, value: Value) -> None:
        """In the place of what was known of it, or of another with its number."""
        self._values[id(key)] = weak_reference(key), value


def weak_reference(target: Any) -> weakref.ref[Any] | None:
    """One that does not keep it; None of what has none, such as a list."""
    with suppress(TypeError):
        return weakref.ref(target)
    return None
