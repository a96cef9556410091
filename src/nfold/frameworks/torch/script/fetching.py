"""How long a script's data set takes for batches, and how much of that it waits, wherever it is.

Workers are forked from this process: they write what they find into memory that both see. A
process that waits for a disk sleeps; one whose cores are taken does not, and Linux tells both
apart: /proc/thread-self/schedstat has the time that a thread wanted a core and had none
(Documentation/scheduler/sched-stats.rst). Workers by spawn are not watched.
"""

from __future__ import annotations

import functools
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from typing import Any

from torch.utils.data import dataloader as module
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from nfold.frameworks.torch.script.known import Known, reference_to
from nfold.frameworks.torch.script.patches import Patches
from nfold.measurement import Fetches

ROWS = 256
"""Of processes that make one loader's batches; from there on two share a row."""
Total = tuple[float, ...]
"""Batches, seconds, seconds of waiting, bytes read, bytes from a disk."""
FIELDS = 5
NONE: Total = (0.0,) * FIELDS
MOST_BYTES = 512
"""Of what the kernel tells in a file."""
SCHEDSTAT, IO = "/proc/thread-self/schedstat", "/proc/self/io"


class Ledger:
    """Sums of what was noted of one data set; every process adds to a row of its own."""

    def __init__(self, data: Any) -> None:
        self._of = reference_to(data)
        self._values = memoryview(mmap.mmap(-1, 8 * ROWS * FIELDS)).cast("d")

    @property
    def ended(self) -> bool:
        """Whether the data set is gone, and no more will be noted."""
        return self._of is not None and self._of() is None

    def add(self, row: int, *noted: float) -> None:
        """One more batch."""
        first = row % ROWS * FIELDS
        for place, value in enumerate((1.0, *noted), start=first):
            self._values[place] += value

    def total(self) -> Total:
        """Over all rows."""
        return tuple(sum(self._values[field::FIELDS]) for field in range(FIELDS))


class Fetching:
    """Notes every batch that a data set gives, in this process and in its workers."""

    def __init__(self) -> None:
        self._in_worker: Callable[[], None] = lambda: None
        self._arrived = False
        self._ledgers: Known[Ledger] = Known()
        self._fed: dict[int, Ledger] = {}
        self._beside: dict[int, Ledger] = {}
        self._gone = NONE

    def install(self, patches: Patches, in_worker: Callable[[], None] = lambda: None) -> None:
        """Stand between a data set and what asks it for batches; a ledger is there before that.

        ``in_worker`` is called in every worker before its first batch: what watched this process
        when a worker was forked would watch every sample that it makes, for ever.
        """
        self._in_worker = in_worker
        if watch() is not None:
            patches.put(module._BaseDataLoaderIter, "__init__", self._beginning)
        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            patches.put(kind, "fetch", self._fetching)

    def total(self, loader: Any, beside: Iterable[Any] = ()) -> Total:
        """What the loader's data set gave so far; zeros where nobody could watch it.

        With what those gave in whose place it is: a script may make its data set anew, too. Of the
        loaders ``beside`` it all but their batches, which are no more of a step's.
        """
        counted = () if loader is None else (loader,)
        for fed, loaders in ((self._beside, beside), (self._fed, counted)):
            for one in loaders:
                if (ledger := self._ledgers.get(one.dataset)) is not None:
                    fed[id(ledger)] = ledger
        for ended in [one for one in self._fed.values() if one.ended]:
            self._gone = _together(self._gone, self._fed.pop(id(ended)).total())
        own = (one.total() for one in self._fed.values())
        others = (one.total() for key, one in self._beside.items() if key not in self._fed)
        return _together(self._gone, *own, *((0.0, *rest) for _, *rest in others))

    def _beginning(self, usual: Any) -> Any:
        @functools.wraps(usual)
        def begin(iterator: Any, loader: Any) -> None:
            if self._ledgers.get(loader.dataset) is None:
                self._ledgers.put(loader.dataset, Ledger(loader.dataset))
            usual(iterator, loader)

        return begin

    def _fetching(self, usual: Any) -> Any:
        @functools.wraps(usual)
        def noted(fetcher: Any, indices: Any) -> Any:
            worker = get_worker_info()
            if worker is not None and not self._arrived:
                self._arrived = True
                self._in_worker()
            ledger = self._ledgers.get(fetcher.dataset)
            before = watch() if ledger is not None else None
            batch = usual(fetcher, indices)
            after = watch() if before is not None else None
            if ledger is not None and before is not None and after is not None:
                ledger.add(0 if worker is None else worker.id + 1, *after.since(before))
            return batch

        return noted


def _together(*totals: Total) -> Total:
    return tuple(map(sum, zip(*totals, strict=True)))


def fetched(before: Total, now: Total) -> Fetches | None:
    """What lies between two totals; None where nothing was ever seen to be given."""
    if not now[0]:
        return None
    more = [max(0.0, after - then) for after, then in zip(now, before, strict=True)]
    batches, read, disk = (round(more[field]) for field in (0, 3, 4))
    return Fetches(
        batches=batches, seconds=more[1], waited_s=more[2], read_bytes=read, disk_bytes=disk
    )


@dataclass(frozen=True)
class Watched:
    """A moment of a thread: seconds on the wall, on a core, without one; times that it slept."""

    wall_s: float
    core_s: float
    delayed_s: float
    sleeps: int
    read_bytes: int
    disk_bytes: int

    def since(self, before: Watched) -> tuple[float, float, int, int]:
        """Seconds, seconds of waiting, bytes read, bytes from a disk.

        A thread that never slept has waited for nothing, whatever a hypervisor took from it.
        """
        seconds = self.wall_s - before.wall_s
        busy = self.core_s - before.core_s + self.delayed_s - before.delayed_s
        waited = max(0.0, seconds - busy) if self.sleeps > before.sleeps else 0.0
        read = self.read_bytes - before.read_bytes
        return seconds, waited, read, self.disk_bytes - before.disk_bytes


class Told(threading.local):
    """The kernel's files on this thread, opened once: what is forked opens its own."""

    def __init__(self) -> None:
        self._process = 0
        self._files: list[FileIO] = []

    def __call__(self) -> tuple[list[bytes], list[bytes]]:
        """The words of both; none of a file that is not there."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._files = [_opened(name) for name in (SCHEDSTAT, IO)]
        first, second = (os.pread(file.fileno(), MOST_BYTES, 0).split() for file in self._files)
        return first, second


def _opened(name: str) -> FileIO:
    with suppress(OSError):
        return FileIO(name)
    return FileIO(os.devnull)


TOLD = Told()


def watch() -> Watched | None:
    """Now, of this thread; None where the kernel does not tell.

    A worker may compute in threads of its own, so all of its cores count; in the process that
    trains, threads of others are busy, too.
    """
    core_s = time.thread_time if get_worker_info() is None else time.process_time
    scheduled, sizes = TOLD()
    if len(scheduled) < 2:
        return None
    named = dict(zip(sizes[::2], sizes[1::2], strict=False))
    return Watched(
        wall_s=time.perf_counter(),
        core_s=core_s(),
        delayed_s=int(scheduled[1]) / 1e9,
        sleeps=resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw,
        read_bytes=int(named.get(b"rchar:", 0)),
        disk_bytes=int(named.get(b"read_bytes:", 0)),
    )
