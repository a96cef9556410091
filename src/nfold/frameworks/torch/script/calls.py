"""Every call of every module of a process, by whomever."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


class ModuleCallHooks:
    """Is told of calls while it is started; ``stop`` leaves no hook behind."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def start(self) -> None:
        """Be told of every call from now on."""
        self._handles = [
            register_module_forward_pre_hook(self._before_call),
            register_module_forward_hook(self._after_call, always_call=True),
        ]

    def stop(self) -> None:
        """Be told of no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_call(self, module: nn.Module, args: Any) -> None:
        """A call begins."""
        raise NotImplementedError

    def _after_call(self, module: nn.Module, args: Any, output: Any) -> None:
        """It is over, well or not."""
        raise NotImplementedError
