"""The weights of a script's convolutions in channels_last, where an experiment wants them so.

They are put in this order before anything holds on to the one they had: a wrapper's buckets and an
optimizer's state are made after it. A convolution computes in channels_last where its weights or
its images are, and what follows keeps to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from nfold.frameworks.torch.script.patches import Patches

IMAGE_DIMENSIONS = 4
"""Dimensions of a convolution's weights [out, in, h, w], as of its images."""


def install_channels_last(patches: Patches) -> None:
    """In whatever is wrapped or optimised from now on."""
    for wrapper in (DistributedDataParallel, DataParallel):
        patches.put(wrapper, "__init__", _wrap_wrapper_init)
    patches.put(Optimizer, "add_param_group", _wrap_add_param_group)


def _wrap_wrapper_init(usual: Any) -> Any:
    def construct(wrapper: Any, /, *args: Any, **kwargs: Any) -> None:
        module = args[0] if args else kwargs.get("module")
        if isinstance(module, nn.Module):
            convert_to_channels_last(module.parameters())
        usual(wrapper, *args, **kwargs)

    return construct


def _wrap_add_param_group(usual: Any) -> Any:
    def add(optimizer: Optimizer, group: dict[str, Any]) -> None:
        usual(optimizer, group)
        convert_to_channels_last(group["params"])

    return add


def convert_to_channels_last(parameters: Iterable[Tensor]) -> None:
    """In place: a parameter stays the object that it is."""
    for parameter in parameters:
        if not is_lazy(parameter) and parameter.dim() == IMAGE_DIMENSIONS:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
