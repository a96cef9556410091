"""Casts of large 16-bit outputs that a loop may never read, made when it reads them.

A model that returns its own loss also returns its logits, which most training loops ignore. For
GPT-2 with 12,288 tokens a step, their cast to fp32 writes 2.5 GB.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nfold.engines.torch.nested_tensors import map_tensors
from nfold.instrument.torch_private import no_torch_function

_tensor: Any = Tensor  # its attributes are descriptors
# What does not depend on the type of the elements
SHAPE_FUNCTIONS: frozenset[Any] = frozenset(
    {
        *(_tensor.size, _tensor.dim, _tensor.numel, _tensor.__len__),
        *(each.__get__ for each in (_tensor.shape, _tensor.ndim, _tensor.device)),
        *(each.__get__ for each in (_tensor.is_cuda, _tensor.requires_grad)),
    }
)


class DeferredCast(Tensor):
    """A 16-bit tensor that acts as its fp32 copy, which the first operation on it makes."""

    whole: Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        with no_torch_function():
            if func in SHAPE_FUNCTIONS:
                return func(*args, **kwargs)
            named = {name: map_tensors(value, materialize) for name, value in kwargs.items()}
            return func(*(map_tensors(value, materialize) for value in args), **named)


def defer_cast(half: Tensor) -> Tensor:
    """Return a tensor that casts ``half`` to fp32 when it is read."""
    return half.as_subclass(DeferredCast)


def materialize(tensor: Tensor) -> Tensor:
    """Return the fp32 copy of a deferred tensor, always the same; another tensor unchanged."""
    if not isinstance(tensor, DeferredCast):
        return tensor
    if tensor.whole is None:
        with no_torch_function(), torch.enable_grad():
            tensor.whole = tensor.as_subclass(Tensor).float()
    return tensor.whole
