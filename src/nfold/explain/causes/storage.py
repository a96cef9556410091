"""C6: reading from the disk. Built-in data are decoded once and lie in memory."""

from __future__ import annotations

from typing import ClassVar

from nfold.explain.causes.base import Cause
from nfold.explain.ladder import Ladder


class Storage(Cause):
    """A slow disk or a remote one."""

    id: ClassVar[str] = "storage"

    def silent(self, ladder: Ladder) -> str | None:
        """Built-in data are read before the first step; a script's disk is part of its input."""
        if ladder.seen is not None:
            return "what a script reads from the disk is part of input"
        return "the data are in memory before the first step"
