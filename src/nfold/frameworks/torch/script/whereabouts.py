"""Which lines of a script its host is at while it makes no step.

Another thread looks at the stack of the one that trains, every few milliseconds and only then. A
line that is seen there counts for the time since the look before: a sampling profiler (S. L.
Graham, P. B. Kessler, M. K. McKusick, gprof: a call graph execution profiler, 1982). Nothing stands
between the script and what it calls.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from heapq import nlargest
from itertools import islice, takewhile
from operator import itemgetter
from statistics import median
from types import CodeType, FrameType

from nfold.measurement import HostGapKind, HostGapLocation
from nfold.place import find_user_frame, frame_line, is_user_code, path_in_package

FINE_INTERVAL_S, COARSE_INTERVAL_S = 0.003, 0.02
"""From one look to the next: in steps that are not timed, and in those that are, which must take
no longer for it.
"""
LONG_GAP_FACTOR = 2.0
"""A pause that is more than so many times as long as the usual one comes after some steps only."""
MAX_SAMPLED_LINES = 4
"""Lines that are kept of each kind of pause."""
SAMPLER_THREAD_NAME = "nfold: whereabouts"
COLLECTIVE_MODULE = "torch.distributed.distributed_c10d"
"""Who is in there waits for other ranks: that is no work of its own."""
SampledLine = tuple[str, str | None]


class StackSampler:
    """Looks at the thread that made it, from ``start`` to ``stop``, between ``open`` and ``close``.

    ``timed`` says whether the steps are timed that are made now.
    """

    def __init__(self, is_timed: Callable[[], bool]) -> None:
        self._is_timed = is_timed
        self._thread = threading.get_ident()
        self._stop_event = threading.Event()
        self._loop_codes: dict[int, CodeType] = {}
        self._gap_start_s: float | None = None
        self._gap_samples = defaultdict[SampledLine, float](float)
        self._step_gaps: list[tuple[float, Mapping[SampledLine, float]]] = []
        self._epoch_gaps = defaultdict[SampledLine, float](float)

    def start(self) -> None:
        """From now on; the loop that trains is what has been called here."""
        codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
        self._loop_codes = {id(code): code for code in codes if is_user_code(code.co_filename)}
        threading.Thread(target=self._sample, name=SAMPLER_THREAD_NAME, daemon=True).start()

    def stop(self) -> None:
        """Look no more; a pause that is open is nobody's."""
        self._stop_event.set()
        self._gap_start_s = None

    def begin_gap(self) -> None:
        """A pause begins, unless it has."""
        if self._gap_start_s is None and not self._stop_event.is_set():
            self._gap_start_s = time.monotonic()

    def end_gap(self, *, at_epoch_boundary: bool) -> None:
        """It is over, if there is one; else it was after a step."""
        if self._gap_start_s is None:
            return
        seconds, self._gap_start_s = time.monotonic() - self._gap_start_s, None
        seen: Mapping[SampledLine, float] = {}
        if self._gap_samples:
            seen, self._gap_samples = self._gap_samples, defaultdict(float)
        if at_epoch_boundary:
            _add_seconds(self._epoch_gaps, seen)
        else:
            self._step_gaps.append((seconds, seen))

    @property
    def sampled_lines(self) -> tuple[HostGapLocation, ...]:
        """Where the pauses were spent that are over; of each kind the longest first."""
        usual, longer = (
            defaultdict[SampledLine, float](float),
            defaultdict[SampledLine, float](float),
        )
        usual_s = median(seconds for seconds, _ in self._step_gaps) if self._step_gaps else 0.0
        for seconds, seen in self._step_gaps:
            _add_seconds(longer if seconds > LONG_GAP_FACTOR * usual_s else usual, seen)
        return (
            *_most_sampled("after a step", usual),
            *_most_sampled("after some steps", longer),
            *_most_sampled("between passes", self._epoch_gaps),
        )

    def _sample(self) -> None:
        before = time.monotonic()
        while not self._stop_event.wait(COARSE_INTERVAL_S if self._is_timed() else FINE_INTERVAL_S):
            now, began_at = time.monotonic(), self._gap_start_s
            if began_at is not None:
                spot = sampled_line(sys._current_frames().get(self._thread), self._loop_codes)
                if spot is not None:
                    self._gap_samples[spot] += now - max(before, began_at)
            before = now


def sampled_line(frame: FrameType | None, loop_codes: Mapping[int, CodeType]) -> SampledLine | None:
    """The line of the loop, or what a package has called there, and what it calls.

    None where that is a collective, or no code of the user's.
    """
    if frame is None:
        return None
    own, calls = find_user_frame(frame)
    if own is None or _is_in_collective(frame, own):
        return None
    inner = ""
    for caller, _ in islice(traceback.walk_stack(own), 1, None):
        if id(own.f_code) in loop_codes:
            break
        if is_user_code(caller.f_code.co_filename):
            inner = own.f_code.co_name if own.f_code.co_name.isidentifier() else inner
            own, calls = caller, f"{inner}()" if inner else calls
        elif path_in_package(caller.f_code.co_filename):
            break
    return frame_line(own), calls


def _is_in_collective(frame: FrameType, own: FrameType) -> bool:
    """Whether a frame of the user's code has called a collective, from which that one comes."""
    within = takewhile(lambda pair: pair[0] is not own, traceback.walk_stack(frame))
    return any(one.f_globals.get("__name__") == COLLECTIVE_MODULE for one, _ in within)


def _add_seconds(to: dict[SampledLine, float], samples: Mapping[SampledLine, float]) -> None:
    for spot, seconds in samples.items():
        to[spot] += seconds


def _most_sampled(when: HostGapKind, spots: Mapping[SampledLine, float]) -> list[HostGapLocation]:
    most = nlargest(MAX_SAMPLED_LINES, spots.items(), key=itemgetter(1))
    return [
        HostGapLocation(kind=when, location=w, callee=c, seconds=round(s, 4)) for (w, c), s in most
    ]
