"""Watching one run: heartbeats, exits and requests to stop; ending it when it must end."""

from __future__ import annotations

import dataclasses
import math
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

from nfold.core.measurement import Caveat, RankSamples
from nfold.core.parent_death import child_environment
from nfold.engines.base import Phase
from nfold.launch.handoff import HandoffFolder, HeartbeatRecord
from nfold.launch.launch_spec import ProcessSpec, RunOptions, RunProgress
from nfold.launch.rank_lifecycle import STACK_SIGNAL
from nfold.telemetry import evaluation, sampler, telemetry_csv

POLL_S = 0.1
FAILURE_GRACE_S = 2.0
"""How long the other ranks may go on after one left word of its failure."""
STACKS_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class TreeExit:
    """How a process tree ended.

    ``exit_code`` is the root's, negative for a signal, None where nfold ended it. ``hung`` is
    the rank that stopped first and its step, ``over`` the seconds that the run was given and the
    step of the slowest rank then, ``stalled_s`` the seconds since that one. ``left`` lists
    processes that outlived SIGKILL.
    """

    exit_code: int | None = None
    hung: tuple[int, int] | None = None
    timed_out: tuple[float, int] | None = None
    stop_signal: int | None = None
    seconds_since_step: float = 0.0
    leftover_pids: tuple[int, ...] = ()


class Supervisor:
    """Starts one process tree and sees it to its end."""

    def __init__(self, folder: HandoffFolder, launch: ProcessSpec, options: RunOptions) -> None:
        self._folder = folder
        self._launch = launch
        self._options = options
        self._pids: dict[int, int] = {}
        self._rate = ThroughputMeter(launch.batch)
        self._step, self._stepped_at = 0, time.monotonic()

    def run(self) -> TreeExit:
        """Start, watch, and end the tree; nothing of it is left when this returns."""
        with self._folder.agent_log.open("wb") as log:
            root = self._start(log)
            tree = ProcessTree(root, self._mark())
            try:
                ending = self._watch(tree)
                stalled_s = time.monotonic() - self._stepped_at
            except BaseException:
                tree.kill()
                raise
            left = tuple(tree.kill())
        return dataclasses.replace(ending, leftover_pids=left, seconds_since_step=stalled_s)

    def _mark(self) -> tuple[str, str] | None:
        name = self._launch.marker_variable
        return None if name is None else (name, self._launch.environment[name])

    def _start(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        environment, spare = child_environment(**self._launch.environment), self._options.warm_agent
        if spare is not None and self._launch.may_use_warm_agent:
            waited = spare.take(self._folder, environment)
            if waited is not None:
                return waited
        return subprocess.Popen(
            self._launch.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def _watch(self, tree: ProcessTree) -> TreeExit:
        failed_at: float | None = None
        limit_s, began = self._options.time_limit_s, time.monotonic()
        while True:
            exit_code = tree.root.poll()
            if exit_code is not None:
                return TreeExit(exit_code=exit_code)
            if self._options.stop:
                self._await_own_end(tree)
                return TreeExit(stop_signal=self._options.stop.signum)
            beats = self._read_beats(tree)
            if limit_s is not None and time.monotonic() - began > limit_s:
                return TreeExit(timed_out=(limit_s, self._step))
            hung = self._hung(tree, beats)
            if hung is not None:
                self._ask_for_stacks(tree)
                return TreeExit(hung=hung)
            if failed_at is None and self._failed():
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > FAILURE_GRACE_S:
                return TreeExit()
            self._report(beats)
            time.sleep(POLL_S)

    def _failed(self) -> bool:
        return not self._launch.restarts and bool(self._folder.read_failures())

    def _await_own_end(self, tree: ProcessTree) -> None:
        signum = self._options.stop.signum
        if signum is None or not self._launch.stop_grace_s:
            return
        tree.signal(tree.root.pid, signal.Signals(signum))
        deadline = time.monotonic() + self._launch.stop_grace_s
        while tree.root.poll() is None and time.monotonic() < deadline:
            self._report(self._read_beats(tree))
            time.sleep(POLL_S)

    def _read_beats(self, tree: ProcessTree) -> dict[int, HeartbeatRecord]:
        beats = self._folder.read_heartbeats()
        pids = {rank: beat.pid for rank, beat in beats.items()}
        if pids != self._pids:
            self._pids = pids
            for pid in pids.values():
                tree.track(pid)
            self._folder.write_rank_pids(pids)
        step = min((beat.step for beat in beats.values()), default=0)
        if step != self._step:
            self._step, self._stepped_at = step, time.monotonic()
        return beats

    def _hung(self, tree: ProcessTree, beats: dict[int, HeartbeatRecord]) -> tuple[int, int] | None:
        if len(beats) < self._launch.processes:
            return None
        silences = [self._silence_s(beat) for beat in beats.values()]
        limits = [self._limit_s(beat) for beat in beats.values()]
        if any(silence < limit for silence, limit in zip(silences, limits, strict=True)):
            return self._find_single_hung_rank(tree, beats)
        return _furthest_behind(tree, beats)

    def _find_single_hung_rank(
        self, tree: ProcessTree, beats: dict[int, HeartbeatRecord]
    ) -> tuple[int, int] | None:
        late = {
            rank: beat
            for rank, beat in beats.items()
            if beat.phase != Phase.FINISHED and self._silence_s(beat) > 2 * self._limit_s(beat)
        }
        return _furthest_behind(tree, late) if late else None

    def _silence_s(self, beat: HeartbeatRecord) -> float:
        return (time.monotonic_ns() - beat.monotonic_ns) / 1e9

    def _limit_s(self, beat: HeartbeatRecord) -> float:
        if self._launch.is_user_script and beat.phase == Phase.STARTING:
            return math.inf
        slow = beat.phase in (Phase.STARTING, Phase.FIRST_STEP)
        return self._options.start_timeout_s if slow else self._options.hang_timeout_s

    def _ask_for_stacks(self, tree: ProcessTree) -> None:
        for pid in self._pids.values():
            tree.signal(pid, STACK_SIGNAL)
            tree.signal(pid, signal.SIGCONT)
        deadline = time.monotonic() + STACKS_TIMEOUT_S
        stacks = [self._folder.stack_file(rank) for rank in self._pids]
        while time.monotonic() < deadline and not all(_has_text(file) for file in stacks):
            time.sleep(POLL_S / 2)

    def _report(self, beats: dict[int, HeartbeatRecord]) -> None:
        if not beats:
            return self._options.on_progress(RunProgress(phase="starting", step=0, total=0))
        behind = min(beats.values(), key=lambda beat: beat.step)
        rate = self._rate.update(behind)
        self._options.on_progress(
            RunProgress(
                phase=behind.phase.name.lower().replace("_", " "),
                step=behind.step,
                total=behind.total,
                samples_per_s=rate,
            )
        )
        return None


class ThroughputMeter:
    """Samples per second from the steps between two glances, at least a second apart."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._last: HeartbeatRecord | None = None
        self._rate: float | None = None

    def update(self, beat: HeartbeatRecord) -> float | None:
        """Take a new beat; the rate is None until two of them are a second apart."""
        if beat.phase != Phase.STEPPING:
            self._last = None
            return self._rate
        if self._last is None:
            self._last = beat
        seconds = (beat.monotonic_ns - self._last.monotonic_ns) / 1e9
        if seconds >= 1:
            self._rate = self._batch * (beat.step - self._last.step) / seconds
            self._last = beat
        return self._rate


def _furthest_behind(tree: ProcessTree, beats: dict[int, HeartbeatRecord]) -> tuple[int, int]:
    def order(entry: tuple[int, HeartbeatRecord]) -> tuple[bool, bool, int, int]:
        _, beat = entry
        finished = beat.phase == Phase.FINISHED
        return (finished, not tree.is_stopped(beat.pid), beat.step, beat.monotonic_ns)

    rank, beat = min(beats.items(), key=order)
    return rank, beat.step


def _has_text(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


SAMPLER_STOP_TIMEOUT_S = 3.0


class TelemetrySession:
    """Runs the sampler for as long as the context lasts.

    ``gpus`` are the run's GPUs by their places in CUDA's order. ``options`` is the run's
    options with a ``watch`` that also tells the devices' load.
    """

    def __init__(self, folder: HandoffFolder, gpus: tuple[int, ...], options: RunOptions) -> None:
        self._csv = folder.telemetry_csv
        self._ranks = folder.ranks_file
        self._gpus = gpus
        self._interval_s = options.telemetry_interval_s
        self._process: subprocess.Popen[bytes] | None = None
        self._watch = options.on_progress
        self._load: float | None = None
        self._load_read = 0.0
        self.options = dataclasses.replace(options, on_progress=self._watch_with_load)

    def __enter__(self) -> TelemetrySession:
        self._process = sampler.start_sampler(self._csv, self._ranks, self._gpus, self._interval_s)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(SAMPLER_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def energy_joules(self, ranks: Sequence[RankSamples]) -> float | None:
        """Energy of all devices over the timed windows, None where none of them says."""
        span = _timed_span(ranks)
        return evaluation.energy_joules(self._csv, *span) if span else None

    def with_clocks(
        self, ranks: Sequence[RankSamples], devices: Sequence[int]
    ) -> tuple[RankSamples, ...]:
        """The ranks with the clocks of their GPUs; rank k has ``devices[k]``."""
        return evaluation.with_clocks(self._csv, ranks, devices) if self._gpus else tuple(ranks)

    def caveats(self, ranks: Sequence[RankSamples]) -> list[Caveat]:
        """What the telemetry of the timed windows holds against their numbers."""
        span = _timed_span(ranks)
        return evaluation.telemetry_caveats(self._csv, *span) if span else []

    def _watch_with_load(self, progress: RunProgress) -> None:
        if time.monotonic() - self._load_read >= self._interval_s:
            self._load_read = time.monotonic()
            self._load = self._device_load()
        self._watch(dataclasses.replace(progress, device_load=self._load))

    def _device_load(self) -> float | None:
        row = telemetry_csv.read_latest_row(self._csv)
        loads = [row.get(f"gpu{gpu}_utilisation_percent") for gpu in self._gpus]
        known = [load for load in loads if load is not None]
        if known:
            return sum(known) / len(known)
        return None if self._gpus else row.get("host_cpu_percent")


def _timed_span(ranks: Sequence[RankSamples]) -> tuple[float, float] | None:
    windows = [window for rank in ranks for window in rank.windows]
    if not windows:
        return None
    return min(w.start_s for w in windows), max(w.start_s + w.seconds for w in windows)


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
