"""What the host reads from a device, without waiting: the value that was really read last."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor

from nfold.frameworks.torch.script.patches import Patches

READS = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu")


class Unwaited:
    """Remembers what every line of code read; from ``begin`` on, gives that back.

    PyTorch's own reads stay real: GradScaler decides by one whether to step.
    """

    def __init__(self) -> None:
        self._read: dict[tuple[object, ...], Any] = {}
        self._on = False

    def install(self, patches: Patches) -> None:
        """Stand in for every way to read a tensor."""
        for name in READS:
            patches.put(Tensor, name, functools.partial(self._reading, name))

    def begin(self) -> None:
        """The warm-up is over: wait for nothing any more."""
        self._on = True

    def _reading(self, name: str, usual: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type == "cpu":
                return usual(tensor, *args, **kwargs)
            frame = sys._getframe(1)
            if str(frame.f_globals.get("__name__", "")).startswith("torch."):
                return usual(tensor, *args, **kwargs)
            return self.value((frame.f_code, frame.f_lasti, name, tensor.shape), usual, tensor)

        return read

    def value(self, where: tuple[object, ...], usual: Any, tensor: Tensor) -> Any:
        """What was read there last; really, before ``begin`` and where nothing was read so far."""
        if not self._on or where not in self._read:
            self._read[where] = usual(tensor)
        found = self._read[where]
        return found.clone() if isinstance(found, Tensor) else found
