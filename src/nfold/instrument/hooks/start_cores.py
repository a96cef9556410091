"""Keeps the process on the cores that it had at its start, for ``restored_affinity``.

Imports no torch: the cores are read before the script starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from nfold.instrument.hooks.patches import Patches

THREADS = Path("/proc/self/task")


class StartCores:
    """Undoes what binds this process to other cores; libraries may bind it without Python."""

    cores: ClassVar[frozenset[int]] = frozenset()

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled and bool(self.cores)
        self.has_applied = False

    @classmethod
    def record(cls) -> None:
        """Read the cores; the script has not started yet."""
        if hasattr(os, "sched_getaffinity"):
            cls.cores = frozenset(os.sched_getaffinity(0))

    def install(self, patches: Patches) -> None:
        if self._enabled:
            self._restore()
            patches.wrap(os, "sched_setaffinity", self._set_affinity)

    def on_first_step(self) -> None:
        """Restore the cores of all threads. One rank may be bound to the cores of its start."""
        if self._enabled:
            self._restore()

    def _set_affinity(self, original: Callable[..., None], pid: int, cores: Iterable[int]) -> None:
        if pid in (0, os.getpid()):
            self.has_applied = True
        else:
            original(pid, cores)

    def _restore(self) -> None:
        for thread in map(int, os.listdir(THREADS)):
            with suppress(OSError):  # the thread has ended
                if frozenset(os.sched_getaffinity(thread)) != self.cores:
                    os.sched_setaffinity(thread, self.cores)
                    self.has_applied = True
