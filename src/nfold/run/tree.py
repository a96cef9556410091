"""The processes of one run: who they are, and ending all of them and no others."""

from __future__ import annotations

import signal
import subprocess
import time

import psutil

KILL_TIMEOUT_S = 5.0


class ProcessTree:
    """The process that nfold started and every process that was seen to descend from it.

    A process is known by its id and its start time, so that an id which the kernel gave to
    somebody else's process in the meantime is never signalled. ``mark`` is an environment
    variable and its value that only this run's processes have: it also finds those whose parent
    is gone (a loader's workers after their rank was killed).
    """

    def __init__(self, root: subprocess.Popen[bytes], mark: tuple[str, str] | None = None) -> None:
        self.root = root
        self._mark = mark
        self._processes: dict[int, psutil.Process] = {}
        self.track(root.pid)

    def track(self, pid: int) -> None:
        """Take note of a process that says it belongs to this run (a rank's own heartbeat)."""
        if pid in self._processes:
            return
        try:
            self._processes[pid] = psutil.Process(pid)
        except psutil.NoSuchProcess:
            return

    def is_stopped(self, pid: int) -> bool:
        """Whether a known process is halted by a signal (SIGSTOP, or a debugger)."""
        process = self._processes.get(pid)
        try:
            return process is not None and process.status() in (
                psutil.STATUS_STOPPED,
                psutil.STATUS_TRACING_STOP,
            )
        except psutil.NoSuchProcess:
            return False

    def signal(self, pid: int, signum: signal.Signals) -> None:
        """Send a signal to one process of the tree, if it is still the same one."""
        process = self._processes.get(pid)
        if process is None:
            return
        try:
            process.send_signal(signum)
        except psutil.NoSuchProcess:
            return

    def kill(self) -> list[int]:
        """SIGKILL the whole tree and wait; returns the ids of what is still there after 5 s."""
        self._discover()
        for process in self._processes.values():
            self.signal(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        self.root.wait()
        others = [p for p in self._processes.values() if p.pid != self.root.pid]
        _, alive = psutil.wait_procs(others, timeout=max(0.0, deadline - time.monotonic()))
        return [process.pid for process in alive if not _is_zombie(process)]

    def _discover(self) -> None:
        for process in list(self._processes.values()):
            try:
                for child in process.children(recursive=True):
                    self._processes.setdefault(child.pid, child)
            except psutil.NoSuchProcess:
                continue
        if self._mark is not None:
            for process in psutil.process_iter():
                if _has_marker(process, self._mark):
                    self._processes.setdefault(process.pid, process)


def _has_marker(process: psutil.Process, mark: tuple[str, str]) -> bool:
    name, value = mark
    try:
        return bool(process.environ().get(name) == value)
    except (psutil.Error, OSError):
        return False


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
