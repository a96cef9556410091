"""C6: reading from the disk. Built-in data are decoded once and lie in memory."""

from __future__ import annotations

from typing import ClassVar

from nfold.explain.causes.base import Cause
from nfold.explain.ladder import Ladder


class Storage(Cause):
    """A slow disk or a remote one."""

    id: ClassVar[str] = "storage"

    def silent(self, ladder: Ladder) -> str | None:
        """Nothing is read in a step."""
        del ladder
        return "the data are in memory before the first step"
