"""Snapshots of the host: CPU time, disk reads and all processes.

All values are cumulative: two snapshots give a rate.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/pid/stat, proc(5), counted from the one after the command's name.
_PARENT, _USER, _SYSTEM, _REAPED_USER, _REAPED_SYSTEM, _STARTED, _RSS = 1, 11, 12, 13, 14, 19, 21


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """One process. ``reaped_s`` is the CPU time of ended descendants that were waited for.

    ``started`` distinguishes processes with the same id and has no unit.
    """

    parent: int
    started: float
    cpu_s: float
    reaped_s: float
    rss_bytes: int


@dataclass(frozen=True)
class HostSnapshot:
    """The host at a time of the monotonic clock, CPU seconds summed over its cores.

    ``working_s`` is user and system time, ``busy_s`` adds interrupts, ``total_s`` adds idle time.
    """

    at_s: float
    working_s: float
    busy_s: float
    total_s: float
    disk_read_bytes: int | None
    processes: Mapping[int, ProcessTimes]

    @functools.cached_property
    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for pid, process in self.processes.items():
            children.setdefault(process.parent, []).append(pid)
        return children

    def tree(self, root: int) -> set[int]:
        """Return a process and all its descendants; empty if it does not exist."""
        found: set[int] = set()
        waiting = [root] if root in self.processes else []
        while waiting:
            pid = waiting.pop()
            if pid not in found:
                found.add(pid)
                waiting.extend(self._children.get(pid, ()))
        return found

    def tree_seconds(self, root: int) -> float:
        """Return the CPU seconds of a tree, ended processes included."""
        tree = [self.processes[pid] for pid in self.tree(root)]
        return sum(process.cpu_s + process.reaped_s for process in tree)

    def tree_rss_bytes(self, root: int) -> int | None:
        """Return the resident memory of a tree; shared pages count for each process."""
        tree = self.tree(root)
        return sum(self.processes[pid].rss_bytes for pid in tree) if tree else None

    def intermediate_processes(self, root: int, pid: int) -> set[int]:
        """Return the ancestors of ``pid`` below ``root``; empty if ``root`` is no ancestor."""
        above: list[int] = []
        while pid in self.processes and len(above) < len(self.processes):
            pid = self.processes[pid].parent
            if pid == root:
                return set(above)
            above.append(pid)
        return set()


def take_snapshot() -> HostSnapshot:
    """Read the state of the host: two files, and one for each visible process."""
    at_s = time.monotonic()
    times = psutil.cpu_times()
    working = times.user + times.nice + times.system
    busy = working + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    return HostSnapshot(at_s, working, busy, busy + idle, total_disk_read_bytes(), list_processes())


def total_disk_read_bytes() -> int | None:
    """Return the bytes read from all physical disks since boot; None if none is visible.

    Loop and RAID devices are not counted: their disks count the same reads.
    """
    disks = psutil.disk_io_counters(perdisk=True) or {}
    counted = [
        counters.read_bytes
        for name, counters in disks.items()
        if os.path.exists(f"/sys/block/{name}/device") or not os.path.exists("/sys/block")
    ]
    return sum(counted) if counted else None


def list_processes() -> dict[int, ProcessTimes]:
    return processes_from_proc() if os.path.exists("/proc/self/stat") else processes_from_psutil()


def processes_from_proc(proc: str = "/proc") -> dict[int, ProcessTimes]:
    """Read /proc/pid/stat (proc(5)) of each process, about 20 µs per process."""
    found = {}
    for name in os.listdir(proc):
        if name.isdecimal():
            stat = _read_at_once(f"{proc}/{name}/stat")
            if stat is not None:
                found[int(name)] = _parse(stat)
    return found


def _read_at_once(path: str) -> bytes | None:
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return os.read(file, 4096)
    except ProcessLookupError:
        return None
    finally:
        os.close(file)


def _parse(stat: bytes) -> ProcessTimes:
    fields = stat[stat.rindex(b")") + 2 :].split()
    return ProcessTimes(
        parent=int(fields[_PARENT]),
        started=float(fields[_STARTED]),
        cpu_s=(int(fields[_USER]) + int(fields[_SYSTEM])) * _TICK_S,
        reaped_s=(int(fields[_REAPED_USER]) + int(fields[_REAPED_SYSTEM])) * _TICK_S,
        rss_bytes=int(fields[_RSS]) * _PAGE_BYTES,
    )


def processes_from_psutil() -> dict[int, ProcessTimes]:
    """Return the same without /proc; skips processes that cannot be read."""
    found = {}
    for process in psutil.process_iter(["ppid", "create_time", "cpu_times", "memory_info"]):
        facts = process.info
        times, memory = facts["cpu_times"], facts["memory_info"]
        if times is not None and memory is not None:
            found[process.pid] = ProcessTimes(
                parent=facts["ppid"] or 0,
                started=facts["create_time"] or 0.0,
                cpu_s=times.user + times.system,
                reaped_s=times.children_user + times.children_system,
                rss_bytes=memory.rss,
            )
    return found


def physical_memory_bytes() -> int:
    return int(psutil.virtual_memory().total)


def shared_memory_bytes(folder: Path = Path("/dev/shm")) -> int | None:  # noqa: S108
    """Return the size of the file system of /dev/shm; None if it does not exist."""
    if not folder.is_dir():
        return None
    size = os.statvfs(folder)
    return size.f_blocks * size.f_frsize


MIN_ELAPSED_S = 0.05  # five ticks of the kernel's clock; shorter rates are mostly rounding


@dataclass(frozen=True)
class SnapshotInterval:
    """The time between two snapshots. A rate is None if the time is too short for it."""

    before: HostSnapshot
    after: HostSnapshot

    @property
    def elapsed_s(self) -> float:
        return self.after.at_s - self.before.at_s

    @property
    def _long_enough(self) -> bool:
        return self.elapsed_s >= MIN_ELAPSED_S

    @property
    def _clock_ran(self) -> bool:
        return self.after.total_s > self.before.total_s

    def cpu_percent(self) -> float | None:
        """Return the busy share of all cores, interrupts included."""
        if not (self._long_enough and self._clock_ran):
            return None
        busy = self.after.busy_s - self.before.busy_s
        share = busy / (self.after.total_s - self.before.total_s)
        return min(100.0, max(0.0, 100 * share))

    def disk_read_bytes_per_s(self) -> float | None:
        before, after = self.before.disk_read_bytes, self.after.disk_read_bytes
        if before is None or after is None or not self._long_enough:
            return None
        return max(0.0, (after - before) / self.elapsed_s)

    def tree_cpu_percent(self, root: int) -> float | None:
        """Return the CPU time of a process and its descendants, in % of one core.

        Ended descendants are included: the parent inherits their time.
        """
        if root not in self.after.processes or not self._long_enough:
            return None
        return max(0.0, 100 * self._tree_s(root) / self.elapsed_s)

    def other_load_percent(self, ranks: Iterable[int], parent: int) -> float | None:
        """Return the CPU time of processes outside the run, in % of one core.

        This is user and system time of the host without the ranks and their descendants, this
        process, ``parent`` (nfold) and the processes between ``parent`` and a rank (the agent).
        None if a rank ended and left workers behind, whose time would count as foreign.
        """
        if not (self._long_enough and self._clock_ran):
            return None
        roots = list(ranks)
        single = {os.getpid(), parent}
        for snapshot in (self.before, self.after):
            single.update(*(snapshot.intermediate_processes(parent, rank) for rank in roots))
        single.difference_update(roots)
        own_s = self._own_s(self.after, roots, single) - self._own_s(self.before, roots, single)
        if own_s < 0:
            return None
        working_s = self.after.working_s - self.before.working_s
        return max(0.0, 100 * (working_s - own_s) / self.elapsed_s)

    def _own_s(self, snapshot: HostSnapshot, roots: Iterable[int], single: Iterable[int]) -> float:
        # The time of a rank that ended is inherited by the agent, then by nfold.
        processes = [snapshot.processes[pid] for pid in single if self._contains(snapshot, pid)]
        trees_s = sum(
            snapshot.tree_seconds(root) for root in roots if self._contains(snapshot, root)
        )
        return trees_s + sum(process.cpu_s + process.reaped_s for process in processes)

    def _tree_s(self, root: int) -> float:
        earlier_s = self.before.tree_seconds(root) if self._contains(self.before, root) else 0.0
        return self.after.tree_seconds(root) - earlier_s

    def _contains(self, snapshot: HostSnapshot, pid: int) -> bool:
        then, now = snapshot.processes.get(pid), self.after.processes.get(pid)
        return then is not None and (now is None or now.started == then.started)
