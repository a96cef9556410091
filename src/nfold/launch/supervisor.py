"""Supervise one run: heartbeats, exit codes, requests to stop, telemetry; end its processes."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from nfold.core.measurement import Caveat, RankSamples
from nfold.core.process_identity import SESSION_VARIABLE, ProcessIdentity
from nfold.engines.base import Phase
from nfold.launch.guardian import GUARDIAN
from nfold.launch.handoff import HandoffFolder, HeartbeatRecord
from nfold.launch.launch_spec import ProcessSpec, RunOptions, RunProgress
from nfold.launch.process_tree import ForkedProcess, IdleDetector, ProcessTree, adopt_orphans
from nfold.launch.rank_lifecycle import STACK_SIGNAL, find_current_call
from nfold.telemetry import evaluation, sampler, telemetry_csv

POLL_S = 0.1
FAILURE_GRACE_S = 2.0  # for the other ranks after one has reported its failure
STACKS_TIMEOUT_S = 2.0
STALLED_S = 10.0  # without a step, if time limits may end a hang
LEFT_ALONE_S = 20.0  # idle since another rank has ended: it waits for that one


@dataclass(frozen=True, kw_only=True)
class TreeExit:
    """How a process tree ended.

    ``exit_code`` is the root's, negative for a signal, None if nfold ended it. ``hung`` is the rank
    that stopped first and its step; ``is_hung_rank_stopped``: by a signal; ``hung_calls`` has the
    ranks and the calls that they were in, from their stacks, also if a time limit ended the tree
    before its first step. ``timed_out`` has the time limit in seconds and the step of the slowest
    rank, ``seconds_since_step`` the time since that step. ``leftover_pids`` are processes that
    outlived SIGKILL, ``detached`` ids and commands of processes that the script started outside of
    the tree.
    """

    exit_code: int | None = None
    hung: tuple[int, int] | None = None
    is_hung_rank_stopped: bool = False
    hung_calls: tuple[tuple[int, str], ...] = ()
    timed_out: tuple[float, int] | None = None
    stop_signal: int | None = None
    seconds_since_step: float = 0.0
    leftover_pids: tuple[int, ...] = ()
    detached: tuple[tuple[int, str], ...] = ()


class Supervisor:
    """Starts one process tree and follows it to its end."""

    def __init__(self, folder: HandoffFolder, launch: ProcessSpec, options: RunOptions) -> None:
        self._folder = folder
        self._launch = launch
        self._options = options
        self._identities: dict[int, ProcessIdentity] = {}
        self._rate = ThroughputMeter(launch.batch)
        self._step, self._stepped_at = 0, time.monotonic()
        self._prompted_ns = 0

    def run(self) -> TreeExit:
        """Start, follow and end the tree; when this returns, its processes have ended."""
        with self._folder.agent_log.open("wb") as log, adopt_orphans():
            marker = GUARDIAN.run_marker(self._folder.path)
            tree = ProcessTree(self._start(log, marker), marker)
            self._idle = IdleDetector(tree)
            try:
                ending = self._watch(tree)
                seconds_since_step = time.monotonic() - self._stepped_at
            except BaseException:
                tree.kill()
                raise
            return dataclasses.replace(
                ending,
                leftover_pids=tuple(tree.kill()),
                detached=tuple(tree.detached()),
                seconds_since_step=seconds_since_step,
            )

    def _start(self, log: IO[bytes], marker: str) -> subprocess.Popen[bytes] | ForkedProcess:
        environment = {**os.environ, **self._launch.environment, SESSION_VARIABLE: marker}
        agent_server = self._options.agent_server
        if agent_server is not None and self._launch.may_use_agent_server:
            agent = agent_server.start_agent(
                self._folder,
                self._launch,
                environment,
                self._options.libraries,
                self._options.stop,
            )
            if agent is not None:
                return agent
        return subprocess.Popen(
            self._launch.command,
            env=environment,
            stdin=None if self._launch.reads_stdin else subprocess.DEVNULL,
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
            if limit_s is not None and time.monotonic() - began > self._extended(limit_s, beats):
                calls = () if self._step else self._ask_for_stacks(tree)
                return TreeExit(timed_out=(limit_s, self._step), hung_calls=calls)
            hung = self._hung(tree, beats)
            if hung is not None:
                stopped = tree.is_stopped(beats[hung[0]].pid)
                calls = self._ask_for_stacks(tree)
                return TreeExit(hung=hung, is_hung_rank_stopped=stopped, hung_calls=calls)
            if failed_at is None and self._failed():
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > FAILURE_GRACE_S:
                return TreeExit()
            self._report(beats)
            time.sleep(POLL_S)

    def _extended(self, limit_s: float, beats: dict[int, HeartbeatRecord]) -> float:
        """Return a longer time limit while all ranks are silent: whether they hang shows later."""
        running = _running(beats)
        stalled = bool(running) and all(
            (len(running) < len(beats) or beat.phase in (Phase.STEPPING, Phase.EVALUATING))
            and self._silence_s(beat) > STALLED_S
            for beat in running.values()
        )
        return limit_s + self._options.hang_timeout_s * stalled

    def _failed(self) -> bool:
        return not self._launch.restarts and bool(self._folder.reports.read_failures())

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
        beats = self._folder.reports.read_heartbeats()
        identities = {rank: beat.identity for rank, beat in beats.items()}
        if identities != self._identities:
            self._identities = identities
            for identity in identities.values():
                tree.track(identity)
            self._folder.agent.write_rank_pids({rank: one.pid for rank, one in identities.items()})
        if self._launch.reads_stdin and 0 in beats and tree.is_reading_stdin(beats[0].pid):
            self._prompted_ns = time.monotonic_ns()
        step = min((beat.step for beat in beats.values()), default=0)
        if step != self._step:
            self._step, self._stepped_at = step, time.monotonic()
        return beats

    def _hung(self, tree: ProcessTree, beats: dict[int, HeartbeatRecord]) -> tuple[int, int] | None:
        if self._launch.is_user_script and any(
            beat.is_inferred or beat.phase == Phase.STARTING for beat in beats.values()
        ):
            return self._hung_script(tree, beats)
        if len(beats) < self._launch.processes:
            return None
        if not self._launch.is_user_script and self._are_left_alone(running := _running(beats)):
            return _furthest_behind(tree, running)
        silences = [self._silence_s(beat) for beat in beats.values()]
        limits = [self._limit_s(beat) for beat in beats.values()]
        if any(silence < limit for silence, limit in zip(silences, limits, strict=True)):
            return self._find_single_hung_rank(tree, beats)
        return _furthest_behind(tree, beats)

    def _are_left_alone(self, beats: dict[int, HeartbeatRecord]) -> bool:
        """Return whether some ranks have ended, and the rest do nothing but wait for them."""
        if not 0 < len(beats) < self._launch.processes:
            return False
        window_s = min(LEFT_ALONE_S, self._options.hang_timeout_s)
        idle = [self._idle.is_idle(b.pid, b.monotonic_ns, window_s) for b in beats.values()]
        return all(idle)

    def _hung_script(
        self, tree: ProcessTree, beats: dict[int, HeartbeatRecord]
    ) -> tuple[int, int] | None:
        # A script reports nothing: silence alone may be an evaluation or a download. Hung is a silent
        # rank that is stopped, or all ranks if none of them uses CPU time or reads or writes.
        beats = {
            rank: beat
            for rank, beat in beats.items()
            if beat.phase == Phase.FINISHED or beat.identity.is_running
        }
        running = _running(beats)
        silent = {r: b for r, b in running.items() if self._silence_s(b) >= self._limit_s(b)}
        stopped = {rank: beat for rank, beat in silent.items() if tree.is_stopped(beat.pid)}
        if stopped:
            return _furthest_behind(tree, stopped)
        idle = [
            self._idle.is_idle(beat.pid, beat.monotonic_ns, self._limit_s(beat) / 2)
            for beat in running.values()
            if self._silence_s(beat) >= self._limit_s(beat) / 2
        ]
        if len(beats) < self._launch.processes or not silent or len(silent) < len(running):
            return None
        return _furthest_behind(tree, running) if all(idle) else None

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
        return (time.monotonic_ns() - max(beat.monotonic_ns, self._prompted_ns)) / 1e9

    def _limit_s(self, beat: HeartbeatRecord) -> float:
        slow = beat.phase in (Phase.STARTING, Phase.FIRST_STEP)
        return self._options.start_timeout_s if slow else self._options.hang_timeout_s

    def _ask_for_stacks(self, tree: ProcessTree) -> tuple[tuple[int, str], ...]:
        for identity in self._identities.values():
            tree.signal(identity.pid, STACK_SIGNAL)
            tree.signal(identity.pid, signal.SIGCONT)
        deadline = time.monotonic() + STACKS_TIMEOUT_S
        stacks = {rank: self._folder.stack_file(rank) for rank in sorted(self._identities)}
        while time.monotonic() < deadline and not all(map(find_current_call, stacks.values())):
            time.sleep(POLL_S / 2)
        time.sleep(POLL_S)  # for the rest of the stacks
        calls = {rank: find_current_call(file) for rank, file in stacks.items()}
        return tuple((rank, call) for rank, call in calls.items() if call is not None)

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
    """Samples per second from the steps between two heartbeats at least a second apart."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._last: HeartbeatRecord | None = None
        self._rate: float | None = None

    def update(self, beat: HeartbeatRecord) -> float | None:
        """Return the rate with a new heartbeat; None until two are a second apart."""
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


def _running(beats: dict[int, HeartbeatRecord]) -> dict[int, HeartbeatRecord]:
    return {rank: beat for rank, beat in beats.items() if beat.phase != Phase.FINISHED}


def _furthest_behind(tree: ProcessTree, beats: dict[int, HeartbeatRecord]) -> tuple[int, int]:
    def order(entry: tuple[int, HeartbeatRecord]) -> tuple[bool, bool, int, int]:
        _, beat = entry
        finished = beat.phase == Phase.FINISHED
        return (finished, not tree.is_stopped(beat.pid), beat.step, beat.monotonic_ns)

    rank, beat = min(beats.items(), key=order)
    return rank, beat.step


SAMPLER_STOP_TIMEOUT_S = 3.0


class TelemetrySession:
    """Runs the telemetry sampler while the context is entered.

    ``gpus`` are CUDA indices. ``options`` are the options of the run, whose ``on_progress`` also
    reports the load of the devices.
    """

    def __init__(self, folder: HandoffFolder, gpus: tuple[int, ...], options: RunOptions) -> None:
        self._csv = folder.telemetry_csv
        self._ranks = folder.agent.rank_pids_file
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
        """Return the energy of all devices over the timed windows; None if none reports power."""
        span = _timed_span(ranks)
        return evaluation.energy_joules(self._csv, *span) if span else None

    def with_clocks(
        self, ranks: Sequence[RankSamples], devices: Sequence[int]
    ) -> tuple[RankSamples, ...]:
        """Return the ranks with the clocks of their GPUs; rank k has ``devices[k]``."""
        return evaluation.with_clocks(self._csv, ranks, devices) if self._gpus else tuple(ranks)

    def caveats(self, ranks: Sequence[RankSamples]) -> list[Caveat]:
        """Return the caveats of the telemetry in the timed windows."""
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
