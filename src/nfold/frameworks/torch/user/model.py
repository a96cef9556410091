"""A user's module made ready: on its device, in its layout, under its precision.

The module stays the user's own object with its names, methods and state_dict: its class becomes
a subclass whose forward moves the inputs and computes under autocast (as fully_shard of PyTorch
does it). A copy or a pickle of it is of the user's class again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nfold.frameworks.torch.batch_norm import synchronize_batch_norm
from nfold.frameworks.torch.disguise import subclass_with_forward
from nfold.frameworks.torch.layout import MEMORY_FORMATS
from nfold.frameworks.torch.nested import map_tensors
from nfold.frameworks.torch.parallel import apply_in_place
from nfold.frameworks.torch.precision import AUTOCAST
from nfold.frameworks.torch.share import CurrentShare
from nfold.frameworks.torch.user.moving import to_device
from nfold.plan import Plan


class PreparedMarker:
    """Marks the subclasses that ``prepare`` makes; ``original`` is the user's class."""

    original: type[nn.Module]


def prepare_module(
    module: nn.Module, plan: Plan, device: torch.device, current_share: CurrentShare | None = None
) -> nn.Module:
    """The same module on ``device``, as the complete ``plan`` says; twice is once.

    ``ledger`` says what this rank's samples count in each step; without it all ranks' do alike.
    """
    if isinstance(module, PreparedMarker):
        return module
    module.to(device)
    memory = MEMORY_FORMATS[plan.layout or "channels_first"]
    if plan.layout == "channels_last":
        module.to(memory_format=memory)  # type: ignore[call-overload]
    synchronize_batch_norm(module, plan, current_share or CurrentShare(plan.devices or 1))
    module.__class__ = _prepared_class(type(module), plan, device)
    return module


def _prepared_class(original: type[nn.Module], plan: Plan, device: torch.device) -> type[nn.Module]:
    """The subclass of ``original``; it keeps its name, so that messages read as before."""
    inner: Callable[..., Any] = original.forward
    if "compiled" in (plan.step or ""):
        inner = torch.compile(inner)
    half = AUTOCAST.get(plan.precision or "fp32")
    memory = MEMORY_FORMATS["channels_last"] if plan.layout == "channels_last" else None

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = to_device((args, kwargs), device, memory)
        if half is None:
            return inner(self, *args, **kwargs)
        with torch.autocast(device.type, dtype=half):
            return _to_fp32(inner(self, *args, **kwargs), half)

    return subclass_with_forward(original, PreparedMarker, forward)


def _to_fp32(output: Any, half: torch.dtype) -> Any:
    """A model's 16-bit outputs in fp32, so that the loss is computed in fp32."""
    return map_tensors(output, lambda value: value.float() if value.dtype == half else value)


def broadcast_from_main(tensors: Iterable[Tensor]) -> None:
    """Give every rank rank 0's values of parameters and buffers."""
    for tensor in tensors:
        apply_in_place(tensor, lambda whole: dist.broadcast(whole, src=0))
