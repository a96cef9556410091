"""How many threads a script computes with: its own number, or another where that is tried."""

from __future__ import annotations

from typing import Any

import torch

from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.torch.script.patches import Patches
from nfold.frameworks.torch.script.tally import Tally


class Threads:
    """Stands where the number is set: noted with its line, and kept where an experiment says so."""

    def __init__(self, left_out: LeftOut, tally: Tally) -> None:
        self._left_out = left_out
        self._tally = tally

    def install(self, patches: Patches, warm_up: Patches) -> None:
        """Put everything in its place."""
        threads = self._left_out.now.threads
        if threads is not None:
            torch.set_num_threads(threads)
            patches.put(torch, "set_num_threads", lambda _usual: lambda _asked: None)
        warm_up.put(torch, "set_num_threads", self._setting)

    def turn(self, own: int) -> None:
        """What is left out has changed; ``own`` is the script's number."""
        threads = self._left_out.now.threads or own
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def _setting(self, usual: Any) -> Any:
        def set_num_threads(count: int) -> None:
            self._tally.place("threads")
            usual(count)

        return set_num_threads
