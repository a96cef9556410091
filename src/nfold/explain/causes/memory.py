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
        seen, size = ladder.seen, ladder.memory_bytes
        if seen is None or seen.peak_memory_bytes is None or size is None:
            return "no run shows what more memory would gain; see peak memory in nfold bench"
        part = f"{seen.peak_memory_bytes / 1e9:.1f} of {size / 1e9:.1f} GB of a device are used"
        return f"{part}: the batch may grow" if 2 * seen.peak_memory_bytes < size else part
