"""The processes of one run: find, signal and end them, and no others."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from weakref import WeakSet

import psutil

from nfold.core.process_identity import ProcessIdentity, session_processes

KILL_TIMEOUT_S = 5.0
WAIT_POLL_S = 0.05
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
IDLE_CPU_SHARE = 0.01  # of one core: NCCL's watchdog threads of a waiting rank use less
IDLE_BYTES_PER_S = 1024  # read and written: a data set is prepared or downloaded faster
IDLE_CHECK_INTERVAL_S = 1.0
READ_SYSCALLS = {"x86_64": "0", "aarch64": "63"}  # numbers of read(2) by machine


@contextlib.contextmanager
def adopt_orphans() -> Iterator[None]:
    """Become the parent of descendants whose own parent ends (Linux), so that they can be found.

    See prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    libc, before = ctypes.CDLL(None), ctypes.c_int(0)
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def is_child(pid: int) -> bool:
    """Return whether a process is a child of this one, which may have ended."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class ForkedProcess:
    """A child of this process that ``subprocess`` did not start, with the methods of Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(WAIT_POLL_S)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


class ProcessTree:
    """The process that nfold started and every process that was seen to descend from it.

    A process is known by its id and its start time: an id that the kernel has given to another
    process in the meantime is never signalled. The session marker of this run also finds processes
    whose parent has ended.
    """

    _alive: ClassVar[WeakSet[ProcessTree]] = WeakSet()  # two while runs alternate

    def __init__(self, root: subprocess.Popen[bytes] | ForkedProcess, marker: str) -> None:
        self.root = root
        self._marker = marker
        self._processes: dict[int, psutil.Process] = {}
        self._add(root.pid)
        self._own_children = {child.pid for child in psutil.Process().children()}
        self._alive.add(self)

    def track(self, identity: ProcessIdentity) -> None:
        """Add a process that reports, if it descends from the root or has the marker of the run."""
        if identity.pid not in self._processes and identity.is_running:
            self._discover()

    def _add(self, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._processes[pid] = psutil.Process(pid)

    def is_stopped(self, pid: int) -> bool:
        """Return whether a process of the tree is stopped by a signal (SIGSTOP) or by a debugger."""
        return self._status(pid) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    def is_waiting_for_disk(self, pid: int) -> bool:
        return self._status(pid) == psutil.STATUS_DISK_SLEEP

    def is_reading_stdin(self, pid: int) -> bool:
        """Return whether the main thread of a process waits for standard input."""
        try:
            call, *arguments = Path(f"/proc/{pid}/syscall").read_text().split()
        except OSError:
            return False
        return call == READ_SYSCALLS.get(platform.machine()) and arguments[0] == "0x0"

    def resource_use(self, pid: int) -> tuple[float, int]:
        """Return the CPU seconds of a process of the tree and its descendants, also of ended ones.

        And the bytes that they read and wrote; 0 where the system does not count them.
        """
        process, seconds, size = self._processes.get(pid), 0.0, 0
        if process is not None:
            with contextlib.suppress(psutil.Error):
                for one in (process, *process.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        seconds += sum(one.cpu_times()[:4])
                        counters = one.io_counters()
                        size += counters.read_chars + counters.write_chars
        return seconds, size

    def signal(self, pid: int, signum: signal.Signals) -> None:
        """Send a signal to a process of the tree, if it is still the same process."""
        process = self._processes.get(pid)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)

    def kill(self) -> list[int]:
        """SIGKILL the whole tree and wait; returns the ids of processes still there after 5 s."""
        self._discover()
        for pid in self._processes:
            self.signal(pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        self.root.wait()
        self._alive.discard(self)
        others = [p for p in self._processes.values() if p.pid != self.root.pid]
        _, alive = psutil.wait_procs(others, timeout=max(0.0, deadline - time.monotonic()))
        return [process.pid for process in alive if not _is_zombie(process)]

    def detached(self) -> list[tuple[int, str]]:
        """Return id and command of processes that the run left behind, after ``kill``.

        They have neither a parent of the tree nor its marker: started in a session of their own
        with another environment. Needs ``adopt_orphans``. None are known while another tree runs,
        because they may be its own.
        """
        if self._alive:
            return []
        found = []
        for child in psutil.Process().children():
            if child.pid in self._own_children or child.pid in self._processes:
                continue
            if _is_zombie(child):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)
                continue
            with contextlib.suppress(psutil.Error):
                found.append((child.pid, " ".join(child.cmdline())[:200]))
        return found

    def _status(self, pid: int) -> str | None:
        process = self._processes.get(pid)
        try:
            return None if process is None else str(process.status())
        except psutil.NoSuchProcess:
            return None

    def _discover(self) -> None:
        known = [pid for pid, process in self._processes.items() if process.is_running()]
        for pid in session_processes(self._marker, known) - self._processes.keys():
            self._add(pid)


@dataclass(frozen=True)
class UseSample:
    """The resources that a process has used up to a time, and whether it was idle up to then."""

    life_sign: int
    start_s: float
    checked_s: float
    cpu_s: float
    io_bytes: int
    is_idle: bool = False


class IdleDetector:
    """Finds processes that use no CPU time and neither read nor write nor wait for a disk."""

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._samples: dict[int, UseSample] = {}

    def is_idle(self, pid: int, life_sign: int, window_s: float) -> bool:
        """Return whether a process was idle for at least ``window_s`` since its last sign of life.

        The window begins with the first call after a new ``life_sign``, and anew when the process
        was busy.
        """
        now, last = time.monotonic(), self._samples.get(pid)
        if last is None or last.life_sign != life_sign:
            self._samples[pid] = UseSample(life_sign, now, now, *self._tree.resource_use(pid))
            return False
        if now - last.start_s < window_s or now - last.checked_s < IDLE_CHECK_INTERVAL_S:
            return last.is_idle
        cpu_s, io_bytes = self._tree.resource_use(pid)
        busy = (
            cpu_s - last.cpu_s > IDLE_CPU_SHARE * (now - last.start_s)
            or io_bytes - last.io_bytes > IDLE_BYTES_PER_S * (now - last.start_s)
            or self._tree.is_waiting_for_disk(pid)
        )
        if busy:
            self._samples[pid] = UseSample(life_sign, now, now, cpu_s, io_bytes)
        else:
            self._samples[pid] = dataclasses.replace(last, checked_s=now, is_idle=True)
        return not busy


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
