"""How many threads a script computes with: its own number, or another where that is tried."""

from __future__ import annotations

from typing import Any

import torch

from nfold.frameworks.left_out import ActiveVariant
from nfold.frameworks.torch.script.patches import Patches
from nfold.frameworks.torch.script.tally import EventCounter


class ThreadCountHook:
    """Stands where the number is set: noted with its line, and kept where an experiment says so."""

    def __init__(self, variant: ActiveVariant, events: EventCounter) -> None:
        self._variant = variant
        self._events = events

    def install(self, patches: Patches, warm_up: Patches) -> None:
        """Put everything in its place."""
        threads = self._variant.current.threads
        if threads is not None:
            torch.set_num_threads(threads)
            patches.put(torch, "set_num_threads", lambda _usual: lambda _asked: None)
        warm_up.put(torch, "set_num_threads", self._wrap_set_num_threads)

    def switch_variant(self, script_threads: int) -> None:
        """What is left out has changed; ``own`` is the script's number."""
        threads = self._variant.current.threads or script_threads
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def _wrap_set_num_threads(self, usual: Any) -> Any:
        def set_num_threads(count: int) -> None:
            self._events.record_location("threads")
            usual(count)

        return set_num_threads
