"""Values of any form, with tensors inside tuples, lists and dictionaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def over_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed; what holds no tensor is left as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(over_tensors(item, change) for item in value))
    if type(value) in (list, tuple):
        return type(value)(over_tensors(item, change) for item in value)
    if type(value) is dict:
        return {name: over_tensors(item, change) for name, item in value.items()}
    return value
