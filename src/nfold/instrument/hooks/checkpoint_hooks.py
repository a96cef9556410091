"""Activation checkpointing: records where a script uses it, and can call its functions directly."""

from __future__ import annotations

from typing import Any

from torch.utils import checkpoint

from nfold.core.errors import Unsupported
from nfold.core.variant import Variant
from nfold.instrument import torch_private
from nfold.instrument.hooks.patches import Patches, wrap_everywhere
from nfold.instrument.hooks.runtime_hooks import EventCounter

OWN_ARGUMENTS = (
    "use_reentrant",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
    "preserve_rng_state",
)
"""Keyword arguments of ``checkpoint`` that its function does not get."""


class CheckpointHooks:
    """Calls functions without checkpointing for ``activation_checkpointing`` false.

    The lines that use it are the event ``checkpoint``. Compiled code is not seen: what it computes
    again is the compiler's choice.
    """

    def __init__(self, variant: Variant, events: EventCounter) -> None:
        self._is_disabled = not variant.activation_checkpointing
        self._events = events
        self.has_applied = False

    def install(self, patches: Patches, warm_up: Patches) -> None:
        if self._is_disabled:
            wrap_everywhere(patches, "checkpoint", self._call_directly, checkpoint)
        warm_up.wrap(checkpoint, torch_private.CHECKPOINT_AUTOCAST, self._record_line)

    def require_applied(self) -> None:
        """Raise Unsupported if the script uses no checkpointing."""
        if self._is_disabled and not self.has_applied:
            raise Unsupported("activation_checkpointing: the script calls no checkpoint()")

    def _call_directly(self, _original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.has_applied = True
        for name in OWN_ARGUMENTS:
            kwargs.pop(name, None)
        return function(*args, **kwargs)

    def _record_line(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._events.record_location("checkpoint")
        return original(*args, **kwargs)
