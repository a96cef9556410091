"""The lines of a data set that take the time of its batches, sampled in every process that makes them.

A sampling profiler (S. L. Graham, P. B. Kessler, M. K. McKusick, gprof: a call graph execution
profiler, 1982): while a batch is fetched, a timer interrupts the process every few milliseconds. A thread
that samples would mostly see lines that wait: at others it does not get the interpreter.
"""

from __future__ import annotations

import json
import linecache
import mmap
import os
import signal
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from heapq import nlargest
from operator import itemgetter
from types import FrameType
from typing import TypeVar

from nfold.core.script_profile import FetchLine
from nfold.core.source_location import frame_line, is_user_code, path_in_package

INTERVAL_S = 0.003
PUBLISH_INTERVAL_S = 0.1
ROWS, ROW_BYTES = 64, 4096  # processes beyond this number share rows
MAX_LINES = 8  # of a process
MAX_CODE = 48  # characters
Result = TypeVar("Result")
Place = tuple[str, str]  # file:line and the code there


class FetchLineSampler:
    """Samples fetches in this process and in forked workers, which write to shared memory."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, ROWS * ROW_BYTES)
        self._process = 0
        self._seconds: defaultdict[Place, float] = defaultdict(float)
        self._sampled_s = 0.0  # 0 while nothing is fetched
        self._published_s = 0.0

    def run(self, row: int, fetch: Callable[[], Result]) -> Result:
        """Call ``fetch`` and sample its stack; ``row`` is the number of the process.

        Does not sample where the script itself handles alarms.
        """
        if threading.current_thread() is not threading.main_thread() or not self._take_alarm():
            return fetch()
        self._sampled_s = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, INTERVAL_S, INTERVAL_S)
        try:
            return fetch()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._sampled_s = 0.0
            now = time.monotonic()
            if now - self._published_s > PUBLISH_INTERVAL_S:
                self._published_s = now
                self._publish(row % ROWS)

    def _take_alarm(self) -> bool:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._seconds.clear()
            if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
                # It stays: a late alarm would end the process.
                signal.signal(signal.SIGALRM, self._on_alarm)
                signal.siginterrupt(signal.SIGALRM, False)
        return signal.getsignal(signal.SIGALRM) == self._on_alarm

    def _on_alarm(self, _signal: int, frame: FrameType | None) -> None:
        """Count the time since the last sample: a call into a library delays alarms until its end."""
        if self._sampled_s and frame is not None:
            before, self._sampled_s = self._sampled_s, time.perf_counter()
            with suppress(Exception):  # would end the fetch of the script
                self._seconds[find_place(frame)] += self._sampled_s - before

    def lines(self) -> tuple[FetchLine, ...]:
        """Return the lines of all processes with their parts of the time, the largest first."""
        total: defaultdict[Place, float] = defaultdict(float)
        for row in range(ROWS):
            text = self._memory[row * ROW_BYTES : (row + 1) * ROW_BYTES].rstrip(b"\0")
            for line, code, seconds in _decode(text):
                total[line, code] += seconds
        every = sum(total.values())
        return tuple(
            FetchLine(location=line, code=code, fraction=seconds / every)
            for (line, code), seconds in nlargest(MAX_LINES, total.items(), key=itemgetter(1))
            if line
        )

    def _publish(self, row: int) -> None:
        most = nlargest(MAX_LINES, self._seconds.items(), key=itemgetter(1))
        rest = sum(self._seconds.values()) - sum(seconds for _, seconds in most)
        lines = [[*place, round(seconds, 4)] for place, seconds in [*most, (("", ""), rest)]]
        text = json.dumps(lines).encode()[:ROW_BYTES].ljust(ROW_BYTES, b"\0")
        self._memory[row * ROW_BYTES : (row + 1) * ROW_BYTES] = text


def _decode(text: bytes) -> Iterator[tuple[str, str, float]]:
    try:
        yield from (tuple(entry) for entry in json.loads(text))
    except ValueError:  # unused, or read while it is written
        return


def find_place(frame: FrameType) -> Place:
    """Return the innermost line of user code in a fetch, or the outermost line of a package there."""
    in_package: Place = "", ""
    for caller, line in traceback.walk_stack(frame):
        file = caller.f_code.co_filename
        if caller.f_code is FetchLineSampler.run.__code__:
            break
        if line is None:  # of bytecode that Python has added
            continue
        if is_user_code(file):
            return frame_line(caller), linecache.getline(file, line).strip()[:MAX_CODE]
        if path := path_in_package(file):
            in_package = f"{path}:{line}", linecache.getline(file, line).strip()[:MAX_CODE]
    return in_package
