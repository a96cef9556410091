"""Makes copies of pinned memory to a GPU asynchronous, for ``non_blocking_copies``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nfold.core.errors import Unsupported
from nfold.instrument.hooks.patches import Patches


class PinnedCopies:
    """Passes ``non_blocking=True`` to ``Tensor.to`` and ``Tensor.cuda`` of pinned memory."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.has_applied = False

    def install(self, patches: Patches) -> None:
        if self._enabled:
            patches.wrap(Tensor, "to", self._to)
            patches.wrap(Tensor, "cuda", self._cuda)

    def require_applied(self) -> None:
        """Raise Unsupported if no copy was changed in the warm-up."""
        if self._enabled and not self.has_applied:
            raise Unsupported(
                "non_blocking_copies: every copy of pinned memory is non-blocking, or none is pinned"
            )

    def _to(self, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        target = next(iter(args), kwargs.get("device", kwargs.get("other")))
        return self._copy(original, tensor, args, kwargs, to_gpu=is_gpu(target))

    def _cuda(self, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._copy(original, tensor, args, kwargs, to_gpu=True)

    def _copy(self, original: Any, tensor: Tensor, args: Any, kwargs: Any, *, to_gpu: bool) -> Any:
        waits = to_gpu and tensor.device.type == "cpu" and not passes_non_blocking(args, kwargs)
        if waits and tensor.is_pinned():
            self.has_applied = True
            kwargs = {**kwargs, "non_blocking": True}
        return original(tensor, *args, **kwargs)


def passes_non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of ``Tensor.to`` or ``Tensor.cuda`` passes ``non_blocking``."""
    return "non_blocking" in kwargs or any(isinstance(argument, bool) for argument in args)


def is_gpu(target: Any) -> bool:
    """Return whether the first argument of ``Tensor.to`` is on another device than the CPU."""
    if isinstance(target, Tensor):
        target = target.device
    if isinstance(target, torch.device):
        return target.type != "cpu"
    if isinstance(target, str):
        return not target.startswith("cpu")
    return isinstance(target, int) and not isinstance(target, bool)
