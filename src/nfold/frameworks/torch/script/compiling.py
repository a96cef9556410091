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
from nfold.frameworks.torch.script.calls import Calls
from nfold.frameworks.torch.script.forward import trains

WRAPPERS = {"DistributedDataParallel", "LightningModule", "_FabricModule"}
"""Names of classes, so that none of their packages is needed."""


class Compiling(Calls):
    """Compiles in a ``mode`` of torch.compile; in none, does nothing."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self._mode = mode
        self._inside = 0
        self._done: list[nn.Module] = []

    def start(self) -> None:
        """Compile what is called from now on."""
        if self._mode:
            super().start()

    def check(self, *, compiled: bool) -> None:
        """Raise Unsupported where it was to be compiled, and nothing is."""
        if self._mode and not compiled:
            raise Unsupported("compiled: no module of the script could be compiled")

    def _before(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or _wraps(module):
            return
        self._inside += 1
        if self._inside > 1 or not torch.is_grad_enabled() or not trains(module):
            return
        if not any(module is one for one in self._done):
            self._done.append(module)
            module.forward = torch.compile(module.forward, mode=self._mode)

    def _after(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling() and not _wraps(module):
            self._inside = max(0, self._inside - 1)


def _wraps(module: nn.Module) -> bool:
    return any(one.__name__ in WRAPPERS for one in type(module).__mro__)
