"""Hooks of optimizers: fused implementations."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import SGD, Adagrad, Adam, AdamW

from nfold.core.errors import Unsupported
from nfold.core.variant import Variant
from nfold.instrument.hooks.patches import Patches

FUSED_CLASSES = (Adam, AdamW, SGD, Adagrad)
IMPLEMENTATION_ARGUMENTS = ("foreach", "fused", "capturable", "differentiable")


class FusedOptimizerHook:
    """Constructs the optimizers of a script with ``fused=True``, for ``fused_optimizer``."""

    def __init__(self, variant: Variant) -> None:
        self._enabled = variant.fused_optimizer
        self._depth = 0
        self.has_applied = False

    def install(self, patches: Patches) -> None:
        for cls in FUSED_CLASSES if self._enabled else ():
            patches.wrap(cls, "__init__", self._construct)

    def require_applied(self) -> None:
        """Raise Unsupported if the script has constructed no optimizer that can be fused."""
        if self._enabled and not self.has_applied:
            names = ", ".join(cls.__name__ for cls in FUSED_CLASSES)
            raise Unsupported(f"fused_optimizer: the script constructs none of {names}")

    def _construct(self, original: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
        # AdamW calls the constructor of Adam.
        if not self._depth:
            chosen = _chosen_implementation(original, optimizer, args, kwargs)
            if chosen:
                name = type(optimizer).__name__
                raise Unsupported(f"fused_optimizer: the script passes {chosen} to {name}")
            kwargs = {**kwargs, "fused": True}
        self._depth += 1
        try:
            original(optimizer, *args, **kwargs)
        finally:
            self._depth -= 1
        self.has_applied = True


def _chosen_implementation(
    original: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    passed = inspect.signature(original).bind_partial(optimizer, *args, **kwargs).arguments
    chosen = [f"{n}={passed[n]}" for n in IMPLEMENTATION_ARGUMENTS if passed.get(n)]
    chosen += [f"{n}=False" for n in ("foreach", "fused") if passed.get(n) is False]
    return ", ".join(chosen)
