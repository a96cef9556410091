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

from nfold.frameworks.torch.batch_norm import synchronise
from nfold.frameworks.torch.disguise import disguised
from nfold.frameworks.torch.layout import FORMATS
from nfold.frameworks.torch.nested import over_tensors
from nfold.frameworks.torch.parallel import in_place
from nfold.frameworks.torch.precision import AUTOCAST
from nfold.frameworks.torch.share import Ledger
from nfold.frameworks.torch.user.moving import moved
from nfold.plan import Plan


class Prepared:
    """Marks the subclasses that ``prepare`` makes; ``original`` is the user's class."""

    original: type[nn.Module]


def prepare(
    module: nn.Module, plan: Plan, device: torch.device, ledger: Ledger | None = None
) -> nn.Module:
    """The same module on ``device``, as the complete ``plan`` says; twice is once.

    ``ledger`` says what this rank's samples count in each step; without it all ranks' do alike.
    """
    if isinstance(module, Prepared):
        return module
    module.to(device)
    memory = FORMATS[plan.layout or "channels_first"]
    if plan.layout == "channels_last":
        module.to(memory_format=memory)  # type: ignore[call-overload]
    synchronise(module, plan, ledger or Ledger(plan.devices or 1))
    module.__class__ = _prepared(type(module), plan, device)
    return module


def _prepared(original: type[nn.Module], plan: Plan, device: torch.device) -> type[nn.Module]:
    """The subclass of ``original``; it keeps its name, so that messages read as before."""
    inner: Callable[..., Any] = original.forward
    if "compiled" in (plan.step or ""):
        inner = torch.compile(inner)
    half = AUTOCAST.get(plan.precision or "fp32")
    memory = FORMATS["channels_last"] if plan.layout == "channels_last" else None

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = moved((args, kwargs), device, memory)
        if half is None:
            return inner(self, *args, **kwargs)
        with torch.autocast(device.type, dtype=half):
            return _in_full(inner(self, *args, **kwargs), half)

    return disguised(original, Prepared, forward)


def _in_full(output: Any, half: torch.dtype) -> Any:
    """A model's 16-bit outputs in fp32, so that the loss is computed in fp32."""
    return over_tensors(output, lambda value: value.float() if value.dtype == half else value)


def same_everywhere(tensors: Iterable[Tensor]) -> None:
    """Give every rank rank 0's values of parameters and buffers."""
    for tensor in tensors:
        in_place(tensor, lambda whole: dist.broadcast(whole, src=0))
