"""C14: a batch that memory cut, an allocator that tries again and again. Not tested yet."""

from __future__ import annotations

from typing import ClassVar

from nfold.explain.causes.base import Cause
from nfold.explain.ladder import Ladder


class Memory(Cause):
    """Too little memory for the batch that would be fastest."""

    id: ClassVar[str] = "memory"

    def silent(self, ladder: Ladder) -> str | None:
        """No run tells what more memory would gain."""
        del ladder
        return "no run shows what more memory would gain; see peak memory in nfold bench"
