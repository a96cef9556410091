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

from nfold.frameworks.left_out import ActiveVariant
from nfold.frameworks.torch.script.patches import Patches

REPLACED_READS = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu")
PASS_THROUGH_MODULES = ("torch._tensor", "nfold.frameworks.torch.script.tensors")
"""Modules that read for somebody else: PyTorch's that writes a tensor as text, ours that counts."""


class HostReads:
    """Remembers what every line of code read; from ``begin`` on, gives that back.

    PyTorch's own reads stay real: GradScaler decides by one whether to step. What a script only
    waits for, ``torch.cuda.synchronize()``, it no longer does.

    Whole numbers may be sizes: each is the one of the same batch, where ``batch`` tells which of
    the first ones is given again.
    """

    def __init__(
        self, variant: ActiveVariant, batch_index: Callable[[], int | None] = lambda: None
    ) -> None:
        self._variant = variant
        self._batch_index = batch_index
        self._values: dict[tuple[object, ...], Any] = {}
        self._past_warm_up = False

    def install(self, patches: Patches) -> None:
        """Stand in for every way to read a tensor."""
        for name in REPLACED_READS:
            patches.put(Tensor, name, functools.partial(self._wrap_read, name))
        patches.put(torch.cuda, "synchronize", self._wrap_synchronize)

    def end_warm_up(self) -> None:
        """The warm-up is over: wait for nothing any more, where that was asked for."""
        self._past_warm_up = True

    @property
    def _is_active(self) -> bool:
        return self._past_warm_up and not self._variant.current.host_syncs

    def _wrap_read(self, name: str, original: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type == "cpu":
                return original(tensor, *args, **kwargs)
            frame = reading_frame(sys._getframe(1))
            if frame is None:
                return original(tensor, *args, **kwargs)
            of = None if tensor.is_floating_point() else self._batch_index()
            return self.last_value(
                (frame.f_code, frame.f_lasti, name, tensor.shape, of), original, tensor
            )

        return read

    def _wrap_synchronize(self, usual: Any) -> Any:
        def synchronize(*args: Any, **kwargs: Any) -> None:
            if not self._is_active or is_nfold_frame(sys._getframe(1)):
                usual(*args, **kwargs)

        return synchronize

    def last_value(self, key: tuple[object, ...], original: Any, tensor: Tensor) -> Any:
        """What was read there last; really, before ``begin`` and where nothing was read so far."""
        if not self._is_active or key not in self._values:
            self._values[key] = original(tensor)
        found = self._values[key]
        return found.clone() if isinstance(found, Tensor) else copy.deepcopy(found)


def reading_frame(frame: FrameType | None) -> FrameType | None:
    """Whose line reads a tensor; None where PyTorch does by itself, and not to print it."""
    while frame is not None and _module_name(frame) in PASS_THROUGH_MODULES:
        frame = frame.f_back
    return None if frame is None or _module_name(frame).startswith("torch.") else frame


def is_nfold_frame(frame: FrameType) -> bool:
    """Whether it is nfold that waits, at the ends of a window."""
    return _module_name(frame).startswith("nfold.")


def _module_name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
