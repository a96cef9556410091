"""The model of a script compiled, where an experiment wants it so.

Each of a script's outermost modules that train is: its ``forward``, from its second call on, so
that hooks and what its wrappers do stay what they are. DistributedDataParallel and Lightning's
modules call others; those are the outermost ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nfold.errors import Unsupported
from nfold.frameworks.torch.script.calls import ModuleCallHooks
from nfold.frameworks.torch.script.forward import is_training

WRAPPER_CLASSES = {"DistributedDataParallel", "LightningModule", "_FabricModule"}
"""Names of classes, so that none of their packages is needed."""


class ModelCompiler(ModuleCallHooks):
    """Compiles in a ``mode`` of torch.compile; in none, does nothing."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self._mode = mode
        self._depth = 0
        self._compiled: list[nn.Module] = []

    def start(self) -> None:
        """Compile what is called from now on."""
        if self._mode:
            super().start()

    def require_compiled(self, *, compiled: bool) -> None:
        """Raise Unsupported where it was to be compiled, and nothing is."""
        if self._mode and not compiled:
            raise Unsupported("compiled: no module of the script could be compiled")

    def _before_call(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or _is_wrapper(module):
            return
        self._depth += 1
        if self._depth > 1 or not torch.is_grad_enabled() or not is_training(module):
            return
        if not any(module is one for one in self._compiled):
            self._compiled.append(module)
            module.forward = torch.compile(module.forward, mode=self._mode)

    def _after_call(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling() and not _is_wrapper(module):
            self._depth = max(0, self._depth - 1)


def _is_wrapper(module: nn.Module) -> bool:
    return any(one.__name__ in WRAPPER_CLASSES for one in type(module).__mro__)
