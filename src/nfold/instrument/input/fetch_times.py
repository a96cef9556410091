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
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from typing import Any, Generic, TypeVar

from torch.utils.data import dataloader as module
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from nfold.core.measurement import FetchStats
from nfold.instrument.hooks.patches import Patches

LEDGER_ROWS = 256
"""Of processes that make one loader's batches; from there on two share a row."""
FetchTotal = tuple[float, ...]
"""Batches, seconds, seconds of waiting, bytes read, bytes from a disk."""
TOTAL_FIELDS = 5
NO_FETCHES: FetchTotal = (0.0,) * TOTAL_FIELDS
MAX_PROC_BYTES = 512
"""Of what the kernel tells in a file."""
PROC_SCHEDSTAT, PROC_IO = "/proc/thread-self/schedstat", "/proc/self/io"


class FetchLedger:
    """Sums of what was noted of one data set; every process adds to a row of its own."""

    def __init__(self, data: Any) -> None:
        self._dataset = weak_reference(data)
        self._values = memoryview(mmap.mmap(-1, 8 * LEDGER_ROWS * TOTAL_FIELDS)).cast("d")

    @property
    def is_orphaned(self) -> bool:
        """Whether the data set is gone, and no more will be noted."""
        return self._dataset is not None and self._dataset() is None

    def add(self, row: int, *noted: float) -> None:
        """One more batch."""
        first = row % LEDGER_ROWS * TOTAL_FIELDS
        for place, value in enumerate((1.0, *noted), start=first):
            self._values[place] += value

    def total(self) -> FetchTotal:
        """Over all rows."""
        return tuple(sum(self._values[field::TOTAL_FIELDS]) for field in range(TOTAL_FIELDS))


class FetchTimer:
    """Notes every batch that a data set gives, in this process and in its workers."""

    def __init__(self) -> None:
        self._on_worker_start: Callable[[], None] = lambda: None
        self._worker_started = False
        self._ledgers: WeakIdentityDict[FetchLedger] = WeakIdentityDict()
        self._epoch_ledgers: dict[int, FetchLedger] = {}
        self._companion_ledgers: dict[int, FetchLedger] = {}
        self._orphaned_total = NO_FETCHES

    def install(self, patches: Patches, on_worker_start: Callable[[], None] = lambda: None) -> None:
        """Stand between a data set and what asks it for batches; a ledger is there before that.

        ``in_worker`` is called in every worker before its first batch: what watched this process
        when a worker was forked would watch every sample that it makes, for ever.
        """
        self._on_worker_start = on_worker_start
        if thread_usage() is not None:
            patches.put(module._BaseDataLoaderIter, "__init__", self._wrap_iterator_init)
        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            patches.put(kind, "fetch", self._wrap_fetch)

    def total(self, loader: Any, companions: Iterable[Any] = ()) -> FetchTotal:
        """What the loader's data set gave so far; zeros where nobody could watch it.

        With what those gave in whose place it is: a script may make its data set anew, too. Of the
        loaders ``beside`` it all but their batches, which are no more of a step's.
        """
        counted = () if loader is None else (loader,)
        for fed, loaders in ((self._companion_ledgers, companions), (self._epoch_ledgers, counted)):
            for one in loaders:
                if (ledger := self._ledgers.get(one.dataset)) is not None:
                    fed[id(ledger)] = ledger
        for ended in [one for one in self._epoch_ledgers.values() if one.is_orphaned]:
            self._orphaned_total = _sum_totals(
                self._orphaned_total, self._epoch_ledgers.pop(id(ended)).total()
            )
        own = (one.total() for one in self._epoch_ledgers.values())
        others = (
            one.total()
            for key, one in self._companion_ledgers.items()
            if key not in self._epoch_ledgers
        )
        return _sum_totals(self._orphaned_total, *own, *((0.0, *rest) for _, *rest in others))

    def _wrap_iterator_init(self, usual: Any) -> Any:
        @functools.wraps(usual)
        def begin(iterator: Any, loader: Any) -> None:
            if self._ledgers.get(loader.dataset) is None:
                self._ledgers.put(loader.dataset, FetchLedger(loader.dataset))
            usual(iterator, loader)

        return begin

    def _wrap_fetch(self, usual: Any) -> Any:
        @functools.wraps(usual)
        def noted(fetcher: Any, indices: Any) -> Any:
            worker = get_worker_info()
            if worker is not None and not self._worker_started:
                self._worker_started = True
                self._on_worker_start()
            ledger = self._ledgers.get(fetcher.dataset)
            before = thread_usage() if ledger is not None else None
            batch = usual(fetcher, indices)
            after = thread_usage() if before is not None else None
            if ledger is not None and before is not None and after is not None:
                ledger.add(0 if worker is None else worker.id + 1, *after.since(before))
            return batch

        return noted


def _sum_totals(*totals: FetchTotal) -> FetchTotal:
    return tuple(map(sum, zip(*totals, strict=True)))


def fetch_difference(before: FetchTotal, now: FetchTotal) -> FetchStats | None:
    """What lies between two totals; None where nothing was ever seen to be given."""
    if not now[0]:
        return None
    more = [max(0.0, after - then) for after, then in zip(now, before, strict=True)]
    batches, read, disk = (round(more[field]) for field in (0, 3, 4))
    return FetchStats(
        batches=batches, seconds=more[1], waited_s=more[2], read_bytes=read, disk_bytes=disk
    )


@dataclass(frozen=True)
class ThreadUsage:
    """A moment of a thread: seconds on the wall, on a core, without one; times that it slept."""

    wall_s: float
    core_s: float
    delayed_s: float
    sleeps: int
    read_bytes: int
    disk_bytes: int

    def since(self, earlier: ThreadUsage) -> tuple[float, float, int, int]:
        """Seconds, seconds of waiting, bytes read, bytes from a disk.

        A thread that never slept has waited for nothing, whatever a hypervisor took from it.
        """
        seconds = self.wall_s - earlier.wall_s
        busy = self.core_s - earlier.core_s + self.delayed_s - earlier.delayed_s
        waited = max(0.0, seconds - busy) if self.sleeps > earlier.sleeps else 0.0
        read = self.read_bytes - earlier.read_bytes
        return seconds, waited, read, self.disk_bytes - earlier.disk_bytes


class ThreadStatFiles(threading.local):
    """The kernel's files on this thread, opened once: what is forked opens its own."""

    def __init__(self) -> None:
        self._process = 0
        self._files: list[FileIO] = []

    def __call__(self) -> tuple[list[bytes], list[bytes]]:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._files = [_open_or_null(name) for name in (PROC_SCHEDSTAT, PROC_IO)]
        first, second = (os.pread(file.fileno(), MAX_PROC_BYTES, 0).split() for file in self._files)
        return first, second


def _open_or_null(name: str) -> FileIO:
    with suppress(OSError):
        return FileIO(name)
    return FileIO(os.devnull)


THREAD_STATS = ThreadStatFiles()


def thread_usage() -> ThreadUsage | None:
    """Now, of this thread; None where the kernel does not tell.

    A worker may compute in threads of its own, so all of its cores count; in the process that
    trains, threads of others are busy, too.
    """
    core_s = time.thread_time if get_worker_info() is None else time.process_time
    scheduled, sizes = THREAD_STATS()
    if len(scheduled) < 2:
        return None
    named = dict(zip(sizes[::2], sizes[1::2], strict=False))
    return ThreadUsage(
        wall_s=time.perf_counter(),
        core_s=core_s(),
        delayed_s=int(scheduled[1]) / 1e9,
        sleeps=resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw,
        read_bytes=int(named.get(b"rchar:", 0)),
        disk_bytes=int(named.get(b"read_bytes:", 0)),
    )


Value = TypeVar("Value")


class WeakIdentityDict(Generic[Value]):
    """Values of objects, by identity: they need no hash, and none is kept for it.

    Python gives the number of one that is gone to another, which nothing is known of. Of a list,
    for one, nobody can tell whether it is gone.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Any] | None, Value]] = {}

    def get(self, key: Any) -> Value | None:
        """Its value, None where it has none."""
        reference, value = self._values.get(id(key), (None, None))
        return value if reference is None or reference() is key else None

    def put(self, key: Any, value: Value) -> None:
        """In the place of what was known of it, or of another with its number."""
        self._values[id(key)] = weak_reference(key), value


def weak_reference(target: Any) -> weakref.ref[Any] | None:
    """One that does not keep it; None of what has none, such as a list."""
    with suppress(TypeError):
        return weakref.ref(target)
    return None
