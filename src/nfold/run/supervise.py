"""Watching one run: heartbeats, exits and requests to stop; ending it when it must end."""

from __future__ import annotations

import dataclasses
import math
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nfold.frameworks.base import Phase
from nfold.lifeline import child_environment
from nfold.run.handoff import HandoffFolder, HeartbeatRecord
from nfold.run.options import RunOptions, RunProgress
from nfold.run.processes import ProcessSpec
from nfold.run.rank import STACK_SIGNAL
from nfold.run.tree import ProcessTree

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
        """Whether a rank left word of its failure and nobody will start it again."""
        return not self._launch.restarts and bool(self._folder.read_failures())

    def _await_own_end(self, tree: ProcessTree) -> None:
        """Pass a request to stop on, and give the ranks their time to end by themselves."""
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
        """The rank that holds the others up, once no rank has beaten for too long."""
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
        """A rank that is silent for twice its limit while others still beat."""
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
        """Have every rank write its Python stacks; a halted one must be let run to do so."""
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
    """A halted rank, else the one with the fewest steps, else the one silent for longest."""

    def order(entry: tuple[int, HeartbeatRecord]) -> tuple[bool, bool, int, int]:
        _, beat = entry
        finished = beat.phase == Phase.FINISHED
        return (finished, not tree.is_stopped(beat.pid), beat.step, beat.monotonic_ns)

    rank, beat = min(beats.items(), key=order)
    return rank, beat.step


def _has_text(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0
