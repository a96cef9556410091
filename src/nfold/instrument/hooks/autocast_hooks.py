"""Computes the forward of the models that train in bf16, by autocast."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from nfold.core.errors import Unsupported
from nfold.instrument.hooks.model_hooks import OutermostModuleHooks
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.input.batch_tensors import map_tensors


class AutocastHooks(OutermostModuleHooks):
    """Replaces the ``forward`` of each outermost module that trains, for ``autocast_bf16``.

    Wrappers such as DistributedDataParallel keep theirs, the modules in them do not. The hooks apply
    autocast in the first call of a module, and its own ``forward`` does so in later calls.
    """

    def __init__(self, *, enabled: bool) -> None:
        super().__init__()
        self._enabled = enabled
        self._first_call: tuple[nn.Module, torch.autocast] | None = None
        self.has_applied = False

    def install(self, patches: Patches) -> None:
        if self._enabled:
            patches.wrap(GradScaler, "scale", _refuse_scaling)
            self.start()

    def require_applied(self) -> None:
        """Raise Unsupported if no module of the script was trained."""
        if self._enabled and not self.has_applied:
            raise Unsupported("autocast_bf16: the script calls no module that trains")

    def _before_outermost(self, module: nn.Module) -> None:
        is_replaced = isinstance(module.forward, AutocastForward)
        if is_replaced or isinstance(module, torch.jit.ScriptModule):
            return
        device = next(p.device.type for p in module.parameters() if p.requires_grad)
        if torch.is_autocast_enabled(device):
            raise Unsupported("autocast_bf16: the script uses autocast")
        context = torch.autocast(device, torch.bfloat16)
        context.__enter__()  # type: ignore[no-untyped-call]
        self._first_call = module, context
        module.forward = AutocastForward(module, device)
        self.has_applied = True

    def _after_module(self, module: nn.Module, output: Any) -> Any:
        first = self._first_call
        if first is None or first[0] is not module:
            return None
        first[1].__exit__(None, None, None)
        self._first_call = None
        return map_tensors(output, to_fp32)


class AutocastForward:
    """The ``forward`` of a module under autocast, as an attribute of the module.

    A copy of the module, or a module that was saved whole, has its own ``forward`` without autocast:
    the bound method of the original would compute with the parameters of the original.
    """

    def __init__(self, module: nn.Module, device: str) -> None:
        functools.update_wrapper(self, module.forward)
        self._module = module
        self._forward = module.forward
        self._device = device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device, torch.bfloat16):
            output = self._forward(*args, **kwargs)
        return map_tensors(output, to_fp32)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")


def to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _refuse_scaling(original: Any, scaler: GradScaler, outputs: Any) -> Any:
    if scaler.is_enabled():
        raise Unsupported("autocast_bf16: the script uses GradScaler")
    return original(scaler, outputs)
