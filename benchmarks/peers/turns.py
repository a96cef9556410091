"""One arm's side of taking turns: train while the driver says so, wait while other arms train.

Driver and rank speak in lines of JSON over the rank's standard input and output:

    rank    {"ready": true, "first_step_s": ..., "ready_s": ..., "peak_memory_bytes": ...,
             "queued_steps": ...}
    driver  {"steps": 200, "skip": 20}
    rank    {"seconds": ..., "steps": 200, "samples": ..., "loss": ..., "peak_memory_bytes": ...}
    driver  {"stop": true}

Needs no framework: what has to be known of one is passed as functions.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO

import psutil


class Stop(Exception):
    """The driver wants no more turns."""


class Conversation(Protocol):
    """What a rank needs of its driver."""

    def send(self, message: dict[str, Any]) -> None:
        """Tell the driver."""

    def receive(self) -> dict[str, Any]:
        """The driver's next command; raises Stop when there is none."""


class Channel:
    """The conversation over two files."""

    def __init__(self, commands: TextIO, answers: TextIO) -> None:
        self._commands = commands
        self._answers = answers

    @classmethod
    def taken(cls) -> Channel:
        """This process's standard streams; what else it prints goes to standard error.

        The descriptors themselves are moved, so that libraries in C do not break in either.
        """
        commands = os.fdopen(os.dup(0), "r")
        answers = os.fdopen(os.dup(1), "w")
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(sys.stderr.fileno(), 1)
        return cls(commands, answers)

    def send(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def receive(self) -> dict[str, Any]:
        line = self._commands.readline()
        command: dict[str, Any] = json.loads(line) if line.strip() else {"stop": True}
        if command.get("stop"):
            raise Stop
        return command


def _nothing() -> None:
    """No device to wait for, no other rank."""


def _since_start() -> float:
    """Seconds that this process has lived."""
    return time.time() - psutil.Process().create_time()


class Turns:
    """Counts a training loop's steps and times the windows that the driver asks for.

    ``samples`` of all ranks count in a step. ``fence`` waits for the device, ``barrier`` for the
    other ranks. ``queued_steps`` is how many steps' input may wait in a loader's queues while
    other arms train: they are to be skipped before the clock starts.
    """

    def __init__(
        self,
        channel: Conversation,
        samples: int,
        *,
        fence: Callable[[], None] = _nothing,
        barrier: Callable[[], None] = _nothing,
        peak_memory_bytes: Callable[[], int] = lambda: 0,
        warmup: int = 30,
        queued_steps: int = 0,
    ) -> None:
        self._channel = channel
        self._samples = samples
        self._fence = fence
        self._barrier = barrier
        self._peak_memory_bytes = peak_memory_bytes
        self._warmup = warmup
        self._queued_steps = queued_steps
        self._loss: Any = None
        self._done = 0
        self._phases = self._all_phases()
        self._left = next(self._phases)

    def step(self, loss: Any, steps: int = 1) -> None:
        """Count ``steps`` optimizer steps that were queued; raises Stop when the driver is done.

        ``loss`` is the last step's, read only at the end of a window.
        """
        self._loss = loss
        self._done += steps
        self._left -= steps
        if self._left <= 0:
            self._left = next(self._phases)

    def _all_phases(self) -> Iterator[int]:
        """Yields how many steps come before the next thing to do."""
        yield 1
        self._fence()
        first_step_s = _since_start()
        yield self._warmup
        self._fence()
        self._channel.send(self._ready(first_step_s))
        while True:
            command = self._channel.receive()
            if command["skip"]:
                yield command["skip"]
            self._meet()
            before, started = self._done, time.perf_counter()
            yield command["steps"]
            self._fence()
            self._channel.send(self._window(self._done - before, time.perf_counter() - started))

    def _meet(self) -> None:
        self._fence()
        self._barrier()
        self._fence()

    def _ready(self, first_step_s: float) -> dict[str, Any]:
        return {
            "ready": True,
            "first_step_s": first_step_s,
            "ready_s": _since_start(),
            "peak_memory_bytes": self._peak_memory_bytes(),
            "queued_steps": self._queued_steps,
        }

    def _window(self, steps: int, seconds: float) -> dict[str, Any]:
        return {
            "seconds": seconds,
            "steps": steps,
            "samples": steps * self._samples,
            "loss": float(self._loss),
            "peak_memory_bytes": self._peak_memory_bytes(),
        }
