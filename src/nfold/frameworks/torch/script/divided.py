"""Models whose parameters are divided for the compute itself, and not only kept in parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

TENSOR_PARALLEL_MODULE = "torch.distributed.tensor.parallel"
TENSOR_PARALLEL_MARK = "_nfold_divided"
"""An attribute of a module that is."""


def tensor_parallel_import_actions() -> dict[str, Callable[[ModuleType], None]]:
    """What to do when a script imports what divides a model: FSDP's tensors look the same."""
    return {TENSOR_PARALLEL_MODULE: _mark_parallelized}


def is_tensor_parallel(models: Iterable[nn.Module]) -> bool:
    """Whether any part of these is."""
    return any(TENSOR_PARALLEL_MARK in vars(part) for model in models for part in model.modules())


def _mark_parallelized(module: ModuleType) -> None:
    usual = module.parallelize_module

    @functools.wraps(usual)
    def parallelize_module(*args: Any, **kwargs: Any) -> Any:
        found = usual(*args, **kwargs)
        vars(found)[TENSOR_PARALLEL_MARK] = True
        return found

    vars(module)["parallelize_module"] = parallelize_module
