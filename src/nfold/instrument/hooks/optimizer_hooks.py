"""Hooks of optimizers: fused implementations, and how gradients are zeroed."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from nfold.core.errors import Unsupported
from nfold.core.variant import Variant
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.runtime_hooks import EventCounter

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


def is_chosen(optimizer: Any) -> bool:
    """Return whether an optimizer was constructed with an implementation of the script's choice."""
    return bool(
        _choosing_arguments(getattr(optimizer, "defaults", {}))
    )  # an update by hand has none


def _chosen_implementation(
    original: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    passed = inspect.signature(original).bind_partial(optimizer, *args, **kwargs).arguments
    return ", ".join(f"{name}={passed[name]}" for name in _choosing_arguments(passed))


def _choosing_arguments(values: Mapping[str, Any]) -> list[str]:
    """Return the arguments whose values choose an implementation."""
    on = [name for name in IMPLEMENTATION_ARGUMENTS if values.get(name)]
    return on + [name for name in ("foreach", "fused") if values.get(name) is False]


class ZeroedGradients:
    """Records where a script fills gradients with zeros; deletes them for ``set_grads_to_none``.

    The lines are the event ``zeroed_gradients``. In the warm-up it raises Unsupported if only some
    parameters have a gradient.
    """

    def __init__(self, variant: Variant, events: EventCounter) -> None:
        self._enabled = variant.set_grads_to_none
        self._events = events
        self.in_warm_up = True
        self.has_applied = False

    def install(self, patches: Patches, warm_up: Patches) -> None:
        for owner in (Optimizer, nn.Module):
            if self._enabled:
                patches.wrap(owner, "zero_grad", self._delete_gradients)
            warm_up.wrap(owner, "zero_grad", self._record_line)

    def end_warm_up(self) -> None:
        """Raise Unsupported if the script has filled no gradients with zeros."""
        self.in_warm_up = False
        if self._enabled and not self.has_applied:
            raise Unsupported("set_grads_to_none: the script never passes set_to_none=False")

    def _record_line(self, original: Any, owner: Any, set_to_none: bool = True) -> None:
        if not set_to_none:
            self._events.record_location("zeroed_gradients")
        original(owner, set_to_none)

    def _delete_gradients(self, original: Any, owner: Any, set_to_none: bool = True) -> None:
        if not set_to_none:
            self.has_applied = True
            if self.in_warm_up:
                _require_gradients(_parameters(owner))
        original(owner, True)


def _parameters(owner: Any) -> Iterable[Tensor]:
    if isinstance(owner, nn.Module):
        return owner.parameters()
    return [parameter for group in owner.param_groups for parameter in group["params"]]


def _require_gradients(parameters: Iterable[Tensor]) -> None:
    missing = [parameter.grad is None for parameter in parameters if parameter.requires_grad]
    if any(missing) and not all(missing):
        raise Unsupported(
            f"set_grads_to_none: {sum(missing)} of {len(missing)} parameters have no gradient in a "
            "step: the optimizer would no longer update them"
        )
