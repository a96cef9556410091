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

from nfold.frameworks.torch.script.moves import derive
from nfold.frameworks.torch.script.patches import Patches
from nfold.frameworks.torch.script.sparse import is_sparse, size_of
from nfold.frameworks.torch.script.tally import Tally
from nfold.frameworks.torch.script.trace import order_of
from nfold.frameworks.torch.script.unwaited import ours, reader
from nfold.place import called_here

READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")
"""What brings a tensor's values to the host: it waits until the device has them."""
CHANGES = ("float", "long", "half", "bfloat16", "pin_memory", "contiguous")
"""What else makes one tensor of another, between a batch and the model."""
SHAPES = ("reshape", "flatten")
"""What copies a tensor whose order of dimensions does not allow a view."""
COPY, PINNED, SYNC = "copy", "copy of pinned memory", "host_sync"


def install(patches: Patches, tally: Tally, moved: Callable[[Tensor], None]) -> None:
    """Count copies and reads of every tensor; only for the warm-up, because calls are frequent.

    ``moved`` is told of each that goes from the host to a device.
    """
    for name in ("to", "cuda", *CHANGES):
        patches.put(Tensor, name, lambda usual: _moving(usual, tally, moved))
    for name in SHAPES:
        patches.put(Tensor, name, lambda usual: _shaping(usual, tally))
    for name in READS:
        patches.put(Tensor, name, lambda usual: _reading(usual, tally))
    patches.put(torch.cuda, "synchronize", lambda usual: _waiting(usual, tally))


def _moving(usual: Any, tally: Tally, moved: Callable[[Tensor], None]) -> Any:
    def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        target = usual(tensor, *args, **kwargs)
        if tally.on:
            if note_copy(tally, tensor, target):
                moved(tensor)
            _note_order(tally, tensor, target, sys._getframe(1))
            derive(tensor, target)
        return target

    return move


def _shaping(usual: Any, tally: Tally) -> Any:
    def shape(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        shaped = usual(tensor, *args, **kwargs)
        if tally.on:
            _note_order(tally, tensor, shaped, sys._getframe(1))
        return shaped

    return shape


def _note_order(tally: Tally, source: Tensor, target: Tensor, caller: FrameType) -> None:
    """Note the line that wrote dimensions in another order, or called what of PyTorch's did.

    Not of what a compiler looks at, whose numbers are symbols.
    """
    if target is source or type(target) is not Tensor or is_sparse(source) or is_sparse(target):
        return
    if not _reorders(source, target):
        return
    where, inside = called_here()
    if reader(caller) is None:
        inside = f"{caller.f_globals['__name__'].replace('.', '/')}.py:{caller.f_lineno}"
    tally.at(f"order on {target.device.type}", where, inside)


def _reorders(source: Tensor, target: Tensor) -> bool:
    """Whether it is a copy on one device in another order of dimensions.

    Into another shape, of a tensor whose order is not that of its shape.
    """
    base = source if source._base is None else source._base
    if source.device != target.device or target._base is base:
        return False
    before = order_of(source.shape, source.stride())
    if source.shape != target.shape:
        return before is not None and not source.is_contiguous()
    after = order_of(target.shape, target.stride())
    return before is not None and after is not None and before != after


def note_copy(tally: Tally, source: Tensor, target: Tensor) -> bool:
    """Note the way between host and device, where there was one; whether it was to a device."""
    on_device, was_on_device = target.device.type != "cpu", source.device.type != "cpu"
    to_device = on_device and not was_on_device
    if to_device:
        tally.note(COPY, PINNED if source.is_pinned() else COPY, size_of(source))
    elif was_on_device and not on_device:
        tally.note(SYNC, SYNC)
    return to_device


def _waiting(usual: Any, tally: Tally) -> Any:
    def synchronize(*args: Any, **kwargs: Any) -> None:
        if not ours(sys._getframe(1)):
            tally.note(SYNC, SYNC)
        usual(*args, **kwargs)

    return synchronize


def _reading(usual: Any, tally: Tally) -> Any:
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tally.on and tensor.device.type != "cpu":
            tally.note(SYNC, SYNC)
        return usual(tensor, *args, **kwargs)

    return read
