"""Step times of a back end that queues its steps: a thread notes when each of them is done.

The thread waits for a step's loss, which is all that it touches; the thread that queues steps
never waits inside a window.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from typing import Any

from nfold.frameworks.clock import HostClock
from nfold.frameworks.keras.engine import KerasBackend


class AsyncStepClock(HostClock):
    """``watch`` each call's loss; the window's marks are the times at which they were there."""

    def __init__(self, engine: KerasBackend) -> None:
        super().__init__()
        self._backend = engine
        self._started = 0.0
        self._done_s: list[float] = []
        self._losses: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._record_times, daemon=True).start()

    def record_loss(self, loss: Any) -> None:
        """Note when this loss is there."""
        self._losses.put(loss)

    def _record_times(self) -> None:
        while True:
            loss = self._losses.get()
            if isinstance(loss, threading.Event):
                loss.set()
                continue
            self._backend.wait_for(loss)
            self._done_s.append(time.monotonic())

    def start(self) -> float:
        """Fence, then begin."""
        self._backend.synchronize()
        self._done_s.clear()
        self._started = time.monotonic()
        return self._started

    def mark(self) -> None:
        """The thread does it."""

    def stop(self) -> tuple[float, list[float]]:
        """Fence, then ask the thread for what it noted."""
        self._backend.synchronize()
        seconds = time.monotonic() - self._started
        everything = threading.Event()
        self._losses.put(everything)
        everything.wait()
        pairs = itertools.pairwise([self._started, *self._done_s])
        return seconds, [1e3 * (after - before) for before, after in pairs]


class SyncStepClock(HostClock):
    """For a back end whose calls return when they are done."""

    def record_loss(self, _loss: Any) -> None:
        """The call is done."""


def open_clock(engine: KerasBackend) -> AsyncStepClock | SyncStepClock:
    """The clock that suits the back end."""
    return AsyncStepClock(engine) if engine.is_asynchronous else SyncStepClock()
