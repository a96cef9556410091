"""``nfold run --watch``: how long a rank waits for batches and for other ranks, in every step.

The host's clock times batches. The exchange is the time from the last gradient of a backward to its
end: on a GPU between two events on its stream, on the CPU by the host's clock. A rank that others wait
for has the shortest one. Imports no torch: hooks are installed when the script imports it.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfold.core.import_hooks import call_after_import
from nfold.core.serialization import serialize
from nfold.launch.handoff import write_json

WATCH_VARIABLE = "NFOLD_WATCH"
FIRST_STEPS = 10  # not timed: compilation, searches, first allocations
WINDOW_S = 2.0
MAX_WINDOWS = 512  # then two become one, and windows twice as long
PAUSE_S, PAUSE_FACTOR = 1.0, 10.0  # a longer step is a pause: an evaluation, a checkpoint
WRITE_INTERVAL_S = 5.0


@dataclass
class StepWindow:
    """Sums over consecutive steps of one rank, in seconds."""

    steps: int = 0
    seconds: float = 0.0
    input_s: float = 0.0
    exchange_s: float = 0.0

    def add(self, other: StepWindow) -> None:
        self.steps += other.steps
        self.seconds += other.seconds
        self.input_s += other.input_s
        self.exchange_s += other.exchange_s


@dataclass(frozen=True)
class WatchedSteps:
    """Timed steps of one rank; ``pauses`` are seconds between two steps that are no step."""

    rank: int
    windows: tuple[StepWindow, ...] = ()
    pauses: tuple[float, ...] = ()

    @property
    def total(self) -> StepWindow:
        total = StepWindow()
        for window in self.windows:
            total.add(window)
        return total


class StepRecorder:
    """Adds up the steps of one rank and writes them to a file, at most every WRITE_INTERVAL_S."""

    def __init__(
        self, file: Path, rank: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._file, self._clock = file, clock
        self._rank = rank
        self._windows: list[StepWindow] = []
        self._pauses: list[float] = []
        self._window = StepWindow()
        self._window_s = WINDOW_S
        self._last_s: float | None = None
        self._written_s = 0.0
        self._input_s = 0.0
        self._steps = 0

    def add_input(self, seconds: float) -> None:
        self._input_s += seconds

    def add_exchange(self, seconds: float) -> None:
        self._window.exchange_s += seconds

    def end_step(self) -> None:
        now, before = self._clock(), self._last_s
        input_s, self._input_s, self._last_s = self._input_s, 0.0, now
        self._steps += 1
        if before is None or self._steps <= FIRST_STEPS:
            self._window.exchange_s = 0.0
            return
        seconds, window = now - before, self._window
        typical_s = window.seconds / window.steps if window.steps else seconds
        if seconds > max(PAUSE_S, PAUSE_FACTOR * typical_s):
            self._pauses.append(seconds)
            return
        window.add(StepWindow(1, seconds, input_s))
        if window.seconds >= self._window_s:
            self._end_window(now)

    def _end_window(self, now: float) -> None:
        windows = self._windows
        windows.append(self._window)
        self._window = StepWindow()
        if len(windows) >= MAX_WINDOWS:
            for first, second in zip(windows[::2], windows[1::2], strict=False):
                first.add(second)
            del windows[1::2]
            self._window_s *= 2
        if now - self._written_s >= WRITE_INTERVAL_S:
            self.write()
            self._written_s = now

    def write(self) -> None:
        rest = (self._window,) if self._window.steps else ()
        seen = WatchedSteps(self._rank, (*self._windows, *rest), tuple(self._pauses))
        write_json(self._file, serialize(seen))


class StepWatch:
    """Hooks into torch that report to a recorder."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._pid = os.getpid()
        self._optimizer: int | None = None
        self._computed: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()

    def install(self) -> None:
        call_after_import(
            {
                "torch.optim.optimizer": self._watch_optimizers,
                "torch.utils.data.dataloader": self._watch_loaders,
                "torch.autograd": self._watch_backward,
            }
        )

    def _watch_optimizers(self, module: Any) -> None:
        torch = module.torch

        def on_step(optimizer: Any, *_: Any) -> None:
            if torch.compiler.is_compiling() or os.getpid() != self._pid:
                return
            self._optimizer = self._optimizer or id(optimizer)
            if id(optimizer) == self._optimizer:
                self._read_events()
                self._recorder.end_step()

        module.register_optimizer_step_post_hook(on_step)

    def _watch_loaders(self, module: Any) -> None:
        iterator_class = module._BaseDataLoaderIter
        original = iterator_class.__next__

        @functools.wraps(original)
        def next_batch(iterator: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(iterator)
            finally:
                self._recorder.add_input(time.perf_counter() - began)

        iterator_class.__next__ = next_batch

    def _watch_backward(self, module: Any) -> None:
        original, torch = module.backward, module.torch

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            loss = tensors[0] if isinstance(tensors, tuple | list) and tensors else tensors
            watched = isinstance(loss, torch.Tensor) and loss.requires_grad
            if (
                not watched
                or torch.compiler.is_compiling()
                or not torch.distributed.is_initialized()
            ):
                return original(tensors, *args, **kwargs)
            mark = functools.partial(_event, torch) if loss.is_cuda else time.perf_counter

            def on_computed() -> None:
                self._computed = mark()

            def on_begin(_: Any) -> None:
                from nfold.instrument.torch_private import queue_backward_callback

                queue_backward_callback(on_computed)

            handle = loss.register_hook(on_begin)
            try:
                return original(tensors, *args, **kwargs)
            finally:
                handle.remove()
                self._end_backward(mark)

        module.backward = backward

    def _end_backward(self, mark: Callable[[], Any]) -> None:
        computed, self._computed = self._computed, None
        if computed is None:
            return
        if isinstance(computed, float):
            self._recorder.add_exchange(mark() - computed)
        else:
            self._pending.append((computed, mark()))

    def _read_events(self) -> None:
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._recorder.add_exchange(first.elapsed_time(last) / 1e3)


def _event(torch: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
