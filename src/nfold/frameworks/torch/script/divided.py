"""Models whose parameters are divided for the compute itself, and not only kept in parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

DIVIDES = "torch.distributed.tensor.parallel"
DIVIDED = "_nfold_divided"
"""An attribute of a module that is."""


def actions() -> dict[str, Callable[[ModuleType], None]]:
    """What to do when a script imports what divides a model: FSDP's tensors look the same."""
    return {DIVIDES: _marking}


def divided(models: Iterable[nn.Module]) -> bool:
    """Whether any part of these is."""
    return any(DIVIDED in vars(part) for model in models for part in model.modules())


def _marking(module: ModuleType) -> None:
    usual = module.parallelize_module

    @functools.wraps(usual)
    def parallelize_module(*args: Any, **kwargs: Any) -> Any:
        found = usual(*args, **kwargs)
        vars(found)[DIVIDED] = True
        return found

    vars(module)["parallelize_module"] = parallelize_module
