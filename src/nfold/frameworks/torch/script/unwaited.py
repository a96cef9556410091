"""What the host reads from a device, without waiting: the value that was really read last."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.torch.script.patches import Patches

READS = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu")
PASSING = ("torch._tensor", "nfold.frameworks.torch.script.tensors")
"""Modules that read for somebody else: PyTorch's that writes a tensor as text, ours that counts."""


class Unwaited:
    """Remembers what every line of code read; from ``begin`` on, gives that back.

    PyTorch's own reads stay real: GradScaler decides by one whether to step. What a script only
    waits for, ``torch.cuda.synchronize()``, it no longer does.

    Whole numbers may be sizes: each is the one of the same batch, where ``batch`` tells which of
    the first ones is given again.
    """

    def __init__(self, left_out: LeftOut, batch: Callable[[], int | None] = lambda: None) -> None:
        self._left_out = left_out
        self._batch = batch
        self._read: dict[tuple[object, ...], Any] = {}
        self._begun = False

    def install(self, patches: Patches) -> None:
        """Stand in for every way to read a tensor."""
        for name in READS:
            patches.put(Tensor, name, functools.partial(self._reading, name))
        patches.put(torch.cuda, "synchronize", self._waiting)

    def begin(self) -> None:
        """The warm-up is over: wait for nothing any more, where that was asked for."""
        self._begun = True

    @property
    def _on(self) -> bool:
        return self._begun and not self._left_out.now.host_syncs

    def _reading(self, name: str, usual: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type == "cpu":
                return usual(tensor, *args, **kwargs)
            frame = reader(sys._getframe(1))
            if frame is None:
                return usual(tensor, *args, **kwargs)
            of = None if tensor.is_floating_point() else self._batch()
            return self.value((frame.f_code, frame.f_lasti, name, tensor.shape, of), usual, tensor)

        return read

    def _waiting(self, usual: Any) -> Any:
        def synchronize(*args: Any, **kwargs: Any) -> None:
            if not self._on or ours(sys._getframe(1)):
                usual(*args, **kwargs)

        return synchronize

    def value(self, where: tuple[object, ...], usual: Any, tensor: Tensor) -> Any:
        """What was read there last; really, before ``begin`` and where nothing was read so far."""
        if not self._on or where not in self._read:
            self._read[where] = usual(tensor)
        found = self._read[where]
        return found.clone() if isinstance(found, Tensor) else copy.deepcopy(found)


def reader(frame: FrameType | None) -> FrameType | None:
    """Whose line reads a tensor; None where PyTorch does by itself, and not to print it."""
    while frame is not None and _module(frame) in PASSING:
        frame = frame.f_back
    return None if frame is None or _module(frame).startswith("torch.") else frame


def ours(frame: FrameType) -> bool:
    """Whether it is nfold that waits, at the ends of a window."""
    return _module(frame).startswith("nfold.")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
