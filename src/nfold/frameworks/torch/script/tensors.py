"""Copies to a device or into another order, and waits for a device, as a script asks for them
through a tensor's methods.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from nfold.frameworks.torch.script.moves import record_source
from nfold.frameworks.torch.script.patches import Patches
from nfold.frameworks.torch.script.sparse import is_sparse, tensor_bytes
from nfold.frameworks.torch.script.tally import EventCounter
from nfold.frameworks.torch.script.trace import dimension_order
from nfold.frameworks.torch.script.unwaited import is_nfold_frame, reading_frame
from nfold.place import current_user_call

COUNTED_READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")
"""What brings a tensor's values to the host: it waits until the device has them."""
CONVERSIONS = ("float", "long", "half", "bfloat16", "pin_memory", "contiguous")
"""What else makes one tensor of another, between a batch and the model."""
RESHAPES = ("reshape", "flatten")
"""What copies a tensor whose order of dimensions does not allow a view."""
COPY, PINNED, HOST_SYNC = "copy", "copy of pinned memory", "host_sync"


def install_tensor_hooks(
    patches: Patches, events: EventCounter, on_transfer: Callable[[Tensor], None]
) -> None:
    """Count copies and reads of every tensor; only for the warm-up, because calls are frequent.

    ``moved`` is told of each that goes from the host to a device.
    """
    for name in ("to", "cuda", *CONVERSIONS):
        patches.put(Tensor, name, lambda usual: _wrap_conversion(usual, events, on_transfer))
    for name in RESHAPES:
        patches.put(Tensor, name, lambda usual: _wrap_reshape(usual, events))
    for name in COUNTED_READS:
        patches.put(Tensor, name, lambda usual: _wrap_counted_read(usual, events))
    patches.put(torch.cuda, "synchronize", lambda usual: _wrap_synchronize(usual, events))


def _wrap_conversion(
    usual: Any, events: EventCounter, on_transfer: Callable[[Tensor], None]
) -> Any:
    def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        target = usual(tensor, *args, **kwargs)
        if events.enabled:
            if record_copy(events, tensor, target):
                on_transfer(tensor)
            _record_layout_copy(events, tensor, target, sys._getframe(1))
            record_source(tensor, target)
        return target

    return move


def _wrap_reshape(usual: Any, events: EventCounter) -> Any:
    def shape(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        shaped = usual(tensor, *args, **kwargs)
        if events.enabled:
            _record_layout_copy(events, tensor, shaped, sys._getframe(1))
        return shaped

    return shape


def _record_layout_copy(
    events: EventCounter, source: Tensor, target: Tensor, caller: FrameType
) -> None:
    """Note the line that wrote dimensions in another order, or called what of PyTorch's did.

    Not of what a compiler looks at, whose numbers are symbols.
    """
    if target is source or type(target) is not Tensor or is_sparse(source) or is_sparse(target):
        return
    if not _changes_dimension_order(source, target):
        return
    where, inside = current_user_call()
    if reading_frame(caller) is None:
        inside = f"{caller.f_globals['__name__'].replace('.', '/')}.py:{caller.f_lineno}"
    events.record_line(f"order on {target.device.type}", where, inside)


def _changes_dimension_order(source: Tensor, target: Tensor) -> bool:
    """Whether it is a copy on one device in another order of dimensions.

    Into another shape, of a tensor whose order is not that of its shape.
    """
    base = source if source._base is None else source._base
    if source.device != target.device or target._base is base:
        return False
    before = dimension_order(source.shape, source.stride())
    if source.shape != target.shape:
        return before is not None and not source.is_contiguous()
    after = dimension_order(target.shape, target.stride())
    return before is not None and after is not None and before != after


def record_copy(events: EventCounter, source: Tensor, target: Tensor) -> bool:
    """Note the way between host and device, where there was one; whether it was to a device."""
    on_device, was_on_device = target.device.type != "cpu", source.device.type != "cpu"
    to_device = on_device and not was_on_device
    if to_device:
        events.count(COPY, PINNED if source.is_pinned() else COPY, tensor_bytes(source))
    elif was_on_device and not on_device:
        events.count(HOST_SYNC, HOST_SYNC)
    return to_device


def _wrap_synchronize(usual: Any, events: EventCounter) -> Any:
    def synchronize(*args: Any, **kwargs: Any) -> None:
        if not is_nfold_frame(sys._getframe(1)):
            events.count(HOST_SYNC, HOST_SYNC)
        usual(*args, **kwargs)

    return synchronize


def _wrap_counted_read(usual: Any, events: EventCounter) -> Any:
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if events.enabled and tensor.device.type != "cpu":
            events.count(HOST_SYNC, HOST_SYNC)
        return usual(tensor, *args, **kwargs)

    return read
