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

from nfold.measurement import PausedAt, When
from nfold.place import installed, is_the_users, line_of, users_frame

FINE_S, COARSE_S = 0.003, 0.02
"""From one look to the next: in steps that are not timed, and in those that are, which must take
no longer for it.
"""
LONGER = 2.0
"""A pause that is more than so many times as long as the usual one comes after some steps only."""
MOST = 4
"""Lines that are kept of each kind of pause."""
NAME = "nfold: whereabouts"
MEETING = "torch.distributed.distributed_c10d"
"""Who is in there waits for other ranks: that is no work of its own."""
Spot = tuple[str, str | None]


class Whereabouts:
    """Looks at the thread that made it, from ``start`` to ``stop``, between ``open`` and ``close``.

    ``timed`` says whether the steps are timed that are made now.
    """

    def __init__(self, timed: Callable[[], bool]) -> None:
        self._timed = timed
        self._thread = threading.get_ident()
        self._over = threading.Event()
        self._loop: dict[int, CodeType] = {}
        self._began_at: float | None = None
        self._now = defaultdict[Spot, float](float)
        self._after_steps: list[tuple[float, Mapping[Spot, float]]] = []
        self._between_passes = defaultdict[Spot, float](float)

    def start(self) -> None:
        """From now on; the loop that trains is what has been called here."""
        codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
        self._loop = {id(code): code for code in codes if is_the_users(code.co_filename)}
        threading.Thread(target=self._watch, name=NAME, daemon=True).start()

    def stop(self) -> None:
        """Look no more; a pause that is open is nobody's."""
        self._over.set()
        self._began_at = None

    def open(self) -> None:
        """A pause begins, unless it has."""
        if self._began_at is None and not self._over.is_set():
            self._began_at = time.monotonic()

    def close(self, *, between_passes: bool) -> None:
        """It is over, if there is one; else it was after a step."""
        if self._began_at is None:
            return
        seconds, self._began_at = time.monotonic() - self._began_at, None
        seen: Mapping[Spot, float] = {}
        if self._now:
            seen, self._now = self._now, defaultdict(float)
        if between_passes:
            _add(self._between_passes, seen)
        else:
            self._after_steps.append((seconds, seen))

    @property
    def found(self) -> tuple[PausedAt, ...]:
        """Where the pauses were spent that are over; of each kind the longest first."""
        usual, longer = defaultdict[Spot, float](float), defaultdict[Spot, float](float)
        usual_s = median(seconds for seconds, _ in self._after_steps) if self._after_steps else 0.0
        for seconds, seen in self._after_steps:
            _add(longer if seconds > LONGER * usual_s else usual, seen)
        return (
            *_longest("after a step", usual),
            *_longest("after some steps", longer),
            *_longest("between passes", self._between_passes),
        )

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(COARSE_S if self._timed() else FINE_S):
            now, began_at = time.monotonic(), self._began_at
            if began_at is not None:
                spot = spot_of(sys._current_frames().get(self._thread), self._loop)
                if spot is not None:
                    self._now[spot] += now - max(before, began_at)
            before = now


def spot_of(frame: FrameType | None, loop: Mapping[int, CodeType]) -> Spot | None:
    """The line of the loop, or what a package has called there, and what it calls.

    None where that is a collective, or no code of the user's.
    """
    if frame is None:
        return None
    own, calls = users_frame(frame)
    if own is None or _meets(frame, own):
        return None
    inner = ""
    for caller, _ in islice(traceback.walk_stack(own), 1, None):
        if id(own.f_code) in loop:
            break
        if is_the_users(caller.f_code.co_filename):
            inner = own.f_code.co_name if own.f_code.co_name.isidentifier() else inner
            own, calls = caller, f"{inner}()" if inner else calls
        elif installed(caller.f_code.co_filename):
            break
    return line_of(own), calls


def _meets(frame: FrameType, own: FrameType) -> bool:
    """Whether a frame of the user's code has called a collective, from which that one comes."""
    within = takewhile(lambda pair: pair[0] is not own, traceback.walk_stack(frame))
    return any(one.f_globals.get("__name__") == MEETING for one, _ in within)


def _add(to: dict[Spot, float], seen: Mapping[Spot, float]) -> None:
    for spot, seconds in seen.items():
        to[spot] += seconds


def _longest(when: When, spots: Mapping[Spot, float]) -> list[PausedAt]:
    most = nlargest(MOST, spots.items(), key=itemgetter(1))
    return [PausedAt(when=when, where=w, calls=c, seconds=round(s, 4)) for (w, c), s in most]
