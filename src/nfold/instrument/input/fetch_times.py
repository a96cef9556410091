"""Time that a dataset needs for batches, and how much of it is waiting.

Workers are forked: they write into memory shared with this process. A process that waits for a disk
sleeps, a process whose cores are busy does not. Linux tells them apart: /proc/thread-self/schedstat
has the time that a thread waited for a core (Documentation/scheduler/sched-stats.rst). Spawned
workers are not timed.
"""

from __future__ import annotations

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

from torch.utils.data import get_worker_info

from nfold.core.measurement import FetchStats
from nfold.core.script_profile import FetchLine
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.input.fetch_lines import FetchLineSampler
from nfold.instrument.torch_private import FETCHERS, BaseDataLoaderIter

LEDGER_ROWS = 256  # workers of a loader beyond this number share rows
# batches, seconds, seconds of waiting, bytes read, bytes read from a disk
FetchTotal = tuple[float, ...]
TOTAL_FIELDS = 5
NO_FETCHES: FetchTotal = (0.0,) * TOTAL_FIELDS
MAX_PROC_BYTES = 512
PROC_SCHEDSTAT, PROC_IO = "/proc/thread-self/schedstat", "/proc/self/io"


class FetchLedger:
    """Fetch totals of one dataset in shared memory; each process adds to its own row."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = _weak_reference(dataset)
        self._values = memoryview(mmap.mmap(-1, 8 * LEDGER_ROWS * TOTAL_FIELDS)).cast("d")

    @property
    def is_orphaned(self) -> bool:
        return self._dataset is not None and self._dataset() is None

    def add(self, row: int, *usage: float) -> None:
        first = row % LEDGER_ROWS * TOTAL_FIELDS
        for index, value in enumerate((1.0, *usage), start=first):
            self._values[index] += value

    def total(self) -> FetchTotal:
        return tuple(sum(self._values[field::TOTAL_FIELDS]) for field in range(TOTAL_FIELDS))


class FetchTimer:
    """Times every fetch of a dataset, in this process and in its workers.

    With ``sample_lines`` it also samples which lines take the time.
    """

    def __init__(self, *, sample_lines: bool = False) -> None:
        self._line_sampler = FetchLineSampler() if sample_lines else None
        self._on_worker_start: Callable[[], None] = lambda: None
        self._worker_started = False
        self._ledgers: WeakIdentityDict[FetchLedger] = WeakIdentityDict()
        self._epoch_ledgers: dict[int, FetchLedger] = {}
        self._companion_ledgers: dict[int, FetchLedger] = {}
        self._orphaned_total = NO_FETCHES

    def install(self, patches: Patches, on_worker_start: Callable[[], None] = lambda: None) -> None:
        """Install before any dataset is fetched from.

        ``on_worker_start`` is called in each worker before its first batch: hooks that were
        installed in this process when a worker was forked would run for every sample.
        """
        self._on_worker_start = on_worker_start
        if thread_usage() is not None:
            patches.wrap(BaseDataLoaderIter, "__init__", self._construct_iterator)
        for kind in FETCHERS:
            patches.wrap(kind, "fetch", self._fetch)

    def total(self, loader: Any, companions: Iterable[Any] = ()) -> FetchTotal:
        """Return the fetches of the loader's dataset so far, and of datasets that it replaced.

        Zeros if fetches cannot be timed. The companions count with all but their batches.
        """
        own, others = self._epoch_ledgers, self._companion_ledgers
        for ledgers, loaders in ((others, companions), (own, () if loader is None else (loader,))):
            for counted in loaders:
                if (ledger := self._ledgers.get(counted.dataset)) is not None:
                    ledgers[id(ledger)] = ledger
        for orphan in [ledger for ledger in own.values() if ledger.is_orphaned]:
            self._orphaned_total = _sum_totals(self._orphaned_total, own.pop(id(orphan)).total())
        return _sum_totals(
            self._orphaned_total,
            *(ledger.total() for ledger in own.values()),
            *((0.0, *ledger.total()[1:]) for key, ledger in others.items() if key not in own),
        )

    def lines(self) -> tuple[FetchLine, ...]:
        """Return the lines that take the time of fetches, the largest part first."""
        return () if self._line_sampler is None else self._line_sampler.lines()

    def _construct_iterator(self, original: Any, iterator: Any, loader: Any) -> None:
        if self._ledgers.get(loader.dataset) is None:
            self._ledgers.put(loader.dataset, FetchLedger(loader.dataset))
        original(iterator, loader)

    def _fetch(self, original: Any, fetcher: Any, indices: Any) -> Any:
        worker = get_worker_info()
        if worker is not None and not self._worker_started:
            self._worker_started = True
            self._on_worker_start()
        ledger = self._ledgers.get(fetcher.dataset)
        before = thread_usage() if ledger is not None else None
        row = 0 if worker is None else worker.id + 1
        if self._line_sampler is None:
            batch = original(fetcher, indices)
        else:
            batch = self._line_sampler.run(row, lambda: original(fetcher, indices))
        after = thread_usage() if before is not None else None
        if ledger is not None and before is not None and after is not None:
            ledger.add(row, *after.since(before))
        return batch


def _sum_totals(*totals: FetchTotal) -> FetchTotal:
    return tuple(map(sum, zip(*totals, strict=True)))


def fetch_difference(before: FetchTotal, now: FetchTotal) -> FetchStats | None:
    """Return the fetches between two totals, None if there was never a fetch."""
    if not now[0]:
        return None
    delta = [max(0.0, later - earlier) for later, earlier in zip(now, before, strict=True)]
    return FetchStats(
        batches=round(delta[0]),
        seconds=delta[1],
        waited_s=delta[2],
        read_bytes=round(delta[3]),
        disk_bytes=round(delta[4]),
    )


@dataclass(frozen=True)
class ThreadUsage:
    """Times of a thread (wall, on a core, waiting for a core), its sleeps and bytes read."""

    wall_s: float
    core_s: float
    delayed_s: float
    sleeps: int
    read_bytes: int
    disk_bytes: int

    def since(self, earlier: ThreadUsage) -> tuple[float, float, int, int]:
        """Return seconds, seconds of waiting, bytes read, bytes read from a disk.

        A thread that never slept has not waited, whatever time a hypervisor took from it.
        """
        seconds = self.wall_s - earlier.wall_s
        busy = self.core_s - earlier.core_s + self.delayed_s - earlier.delayed_s
        waited = max(0.0, seconds - busy) if self.sleeps > earlier.sleeps else 0.0
        read = self.read_bytes - earlier.read_bytes
        return seconds, waited, read, self.disk_bytes - earlier.disk_bytes


class ThreadStatFiles(threading.local):
    """Reads the kernel's files about this thread; opens them once per process."""

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
    """Return the usage of this thread now, None if the kernel does not report it.

    A worker may compute in several threads: the core time of its process counts. In the process
    that trains other threads are busy too: only this thread counts.
    """
    core_clock = time.thread_time if get_worker_info() is None else time.process_time
    schedstat, io = THREAD_STATS()
    if len(schedstat) < 2:
        return None
    sizes = dict(zip(io[::2], io[1::2], strict=False))
    return ThreadUsage(
        wall_s=time.perf_counter(),
        core_s=core_clock(),
        delayed_s=int(schedstat[1]) / 1e9,
        sleeps=resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw,
        read_bytes=int(sizes.get(b"rchar:", 0)),
        disk_bytes=int(sizes.get(b"read_bytes:", 0)),
    )


Value = TypeVar("Value")


class WeakIdentityDict(Generic[Value]):
    """Maps objects by identity, without a hash and without a reference to them.

    Python reuses the id of a deleted object: a weak reference tells whether the entry is valid.
    Lists, for example, cannot be referenced weakly, and stay valid.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Any] | None, Value]] = {}

    def get(self, key: Any) -> Value | None:
        reference, value = self._values.get(id(key), (None, None))
        return value if reference is None or reference() is key else None

    def put(self, key: Any, value: Value) -> None:
        self._values[id(key)] = _weak_reference(key), value


def _weak_reference(target: Any) -> weakref.ref[Any] | None:
    with suppress(TypeError):
        return weakref.ref(target)
    return None
