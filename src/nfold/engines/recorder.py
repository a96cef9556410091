"""How long a run is, and how it is cut into windows."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from nfold.core.errors import Diverged
from nfold.core.interleave import round_to_loader_cycle
from nfold.core.measurement import Epoch, EpochGap, FetchStats, RankSamples, Window
from nfold.core.plan import Plan
from nfold.engines.base import Observer, Phase
from nfold.engines.step_clock import StepClock

TARGET_WINDOWS = 10
MAX_WINDOW_STEPS = 500
MIN_WINDOWS = 5
"""Fewer tell too little of how windows differ."""


@dataclass(frozen=True)
class RunLength:
    """How many steps a run has, how many of them warm up, how many make a window.

    ``before`` steps were made by an earlier process, and are not counted in the others.
    """

    total: int
    warmup: int
    window: int
    resumed_steps: int = 0

    @classmethod
    def from_steps(cls, total: int, warmup: int, resumed_steps: int = 0) -> RunLength:
        """Between one step and half of them warm up; the rest is cut into about ten windows."""
        warmup = min(max(1, warmup), total // 2)
        window = min(max(1, math.ceil((total - warmup) / TARGET_WINDOWS)), MAX_WINDOW_STEPS)
        return cls(total, warmup, window, resumed_steps)

    def in_worker_rounds(self, plan: Plan, max_steps: int) -> RunLength:
        """The same in windows of whole rounds of the plan's loader, of at most ``most`` steps."""
        return dataclasses.replace(self, window=round_to_loader_cycle(self.window, plan, max_steps))


def plan_length(plan: Plan, total: int, resumed_steps: int = 0) -> RunLength:
    """So many steps of a plan, warm-up included, in whole rounds if there are enough of those."""
    warmup = plan.warmup_steps or 0
    return RunLength.from_steps(total, warmup, resumed_steps).in_worker_rounds(
        plan, max_steps=(total - warmup) // MIN_WINDOWS
    )


def checksum(contents: Iterable[bytes]) -> str:
    """SHA-256 of the bytes of all parameters, 16 hex digits: equal where parameters are."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()[:16]


Loss = TypeVar("Loss")


@dataclass(frozen=True)
class CompletedCall(Generic[Loss]):
    """One call of ``steps`` steps with ``count`` samples each, whose losses are not yet read."""

    loss: Loss
    steps: int
    count: int


@dataclass(frozen=True)
class _WindowEnd:
    """The end of a window: its ``calls``, counted from the last fence, and what was known then."""

    calls: int
    variant_index: int | None
    measured: bool
    fetches: FetchStats | None


@dataclass(frozen=True)
class TimedWindow:
    """A window, whether it counts, whose turn it was, and what its steps took."""

    window: Window
    measured: bool
    variant_index: int | None
    step_ms: tuple[float, ...]


class WindowBuffer(Generic[Loss]):
    """``add`` every call, ``cut`` where a window ends, and read the ``timed`` after the fence."""

    def __init__(self) -> None:
        self.calls: list[CompletedCall[Loss]] = []
        self._window_ends: list[_WindowEnd] = []
        self.open_steps = 0
        """Those in no window that has ended."""

    @property
    def steps(self) -> int:
        """Since the last fence."""
        return sum(call.steps for call in self.calls)

    def add(self, call: CompletedCall[Loss]) -> None:
        """One more."""
        self.calls.append(call)
        self.open_steps += call.steps

    def end_window(
        self, variant_index: int | None, *, measured: bool, fetches: FetchStats | None
    ) -> None:
        """A window ends here, if it has a step."""
        if self.open_steps:
            self._window_ends.append(_WindowEnd(len(self.calls), variant_index, measured, fetches))
            self.open_steps = 0

    def timed_windows(
        self,
        first_step: int,
        start_s: float,
        seconds: float,
        call_ms: Sequence[float],
        epoch_gap: EpochGap | None,
        ahead_s: float | None,
    ) -> Iterator[TimedWindow]:
        """The windows, which took so long together; ``made`` steps were before them.

        ``between`` lies before the first, and devices were ``ahead_s`` behind after the last.
        """
        first, end_s = 0, start_s + seconds
        for cut in self._window_ends:
            calls, their_ms = self.calls[first : cut.calls], call_ms[first : cut.calls]
            last = cut is self._window_ends[-1]
            window = Window(
                start_s=start_s,
                seconds=end_s - start_s if last else sum(their_ms) / 1e3,
                steps=sum(call.steps for call in calls),
                samples=sum(call.steps * call.count for call in calls),
                first_step=first_step,
                fetches=cut.fetches,
                epoch_gap=None if first else epoch_gap,
                queue_drain_s=ahead_s if last else None,
            )
            pairs = zip(their_ms, calls, strict=True)
            step_ms = tuple(ms / call.steps for ms, call in pairs for _ in range(call.steps))
            yield TimedWindow(window, cut.measured, cut.variant_index, step_ms)
            first, first_step = cut.calls, first_step + window.steps
            start_s += window.seconds

    def clear(self) -> None:
        """A fence: what comes is another stretch."""
        self.calls.clear()
        self._window_ends.clear()
        self.open_steps = 0


# What one rank notes while it trains: windows, steps, losses, sample hashes, heartbeats.
#
# The same for every framework. Inside a window nothing here touches the device except the clock's
# mark: losses are kept as the framework's own tensors and read after the window's closing fence.

HASH_BITS = 64

ReadLosses = Callable[[Sequence[Loss]], Sequence[float]]
"""The losses of all steps, in order, from what the framework returned for them."""


class CountedBatch(Protocol):
    """What is noted of a batch: its samples that count, and their hash."""

    @property
    def count(self) -> int:
        """Samples of this rank."""

    @property
    def sample_hash(self) -> int:
        """A hash of them that does not depend on their order."""


class Recorder(Generic[Loss]):
    """One rank's notes. Call ``begin``, then ``step`` or ``made`` after each call, then ``end``."""

    def __init__(
        self,
        rank: int,
        device: str,
        clock: StepClock,
        observer: Observer,
        length: RunLength,
        read: ReadLosses[Loss],
        read_fetches: Callable[[], FetchStats | None] = lambda: None,
        fence_interval_s: float = 0.0,
    ) -> None:
        """``length`` may change until the warm-up is over. ``fetched`` tells of the batches that
        were made since it was last asked.

        Windows follow each other without a fence for ``span_s`` seconds: after one, devices wait
        until the host has something for them, which in a step without one it had long before.
        """
        self._rank = rank
        self.device = device
        self._clock, self._observer, self.length = clock, observer, length
        self._read = read
        self._read_fetches = read_fetches
        self._fence_interval_s = fence_interval_s
        self._buffer: WindowBuffer[Loss] = WindowBuffer()
        self._window_start = self._last_end = 0.0
        self._epoch_first_step = self._epoch_steps = self.steps = 0
        self._first_batch_requested_at: float | None = None
        self._epoch_gap: EpochGap | None = None
        self._windows: list[Window] = []
        self._variant_indices: list[int] = []
        self._variant_index: int | None = None
        self._step_ms: list[float] = []
        self._losses: list[tuple[int, float]] = []
        self._epochs: list[Epoch] = []
        self._hashes: list[tuple[int, str]] = []
        self._epoch_hash = (0, 0)
        self._epoch_losses: list[float] = []
        self._first_step_ms: float | None = None
        self._discarding = False

    @property
    def done(self) -> bool:
        """Whether all planned steps were made."""
        return self.steps >= self.length.total

    def begin_epoch(self) -> None:
        """Begin an epoch: fence, and start a window."""
        self._epoch_hash, self._epoch_losses = (0, 0), []
        self._report_step()
        self._begin_data_pass()

    def record_step(self, batch: CountedBatch, loss: Loss) -> None:
        """Note one step; close the window where it is full, warm-up ends, or it was the first."""
        self.record_steps(1, batch.count, batch.sample_hash, loss)

    def record_steps(self, steps: int, count: int, sample_hash: int, loss: Loss) -> None:
        """Note one call that made ``steps`` steps of ``count`` samples each, as ``step`` does.

        ``sample_hash`` is of all their samples, ``loss`` holds one loss for each step.
        """
        self._clock.mark()
        before, self.steps = self.steps, self.steps + steps
        self._buffer.add(CompletedCall(loss, steps, count))
        counted, total = self._epoch_hash
        self._epoch_hash = (counted + steps * count, (total + sample_hash) % 2**HASH_BITS)
        self._report_step()
        if self._window_is_full(before):
            self._end_window(fenced=before == 0 or self.done)

    def exclude_gap(self, *, epoch_ended: bool = False, epoch_scale: float = 1.0) -> None:
        """What has passed since the last step belongs to no window; the next one begins now.

        It lies between two passes over the data where one ``pass_ended`` since that step, which
        stands for one so many ``times`` as long. From then until this is called again, the next
        one's first batch is waited for.
        """
        self._close_window()
        if epoch_ended:
            self._begin_data_pass(epoch_scale)
        else:
            self._start_window()

    def begin_slot(self, variant_index: int | None) -> None:
        """A window ends here; what follows is of this turn, or with None, is not kept."""
        self._epoch_steps = 0
        self._end_window(fenced=variant_index is None)
        self._variant_index, self._discarding = variant_index, variant_index is None

    def end_epoch(self) -> tuple[float, int]:
        """End an epoch; returns this rank's sum of losses over its samples, and their number.

        The sum does not depend on how the epoch was cut into windows.
        """
        self._close_window()
        count, total = self._epoch_hash
        self._hashes.append((count, f"{total:016x}"))
        return math.fsum(self._epoch_losses), count

    def add_epoch(self, epoch: Epoch) -> None:
        """Add a finished epoch, as all ranks together saw it."""
        self._epochs.append(epoch)

    def resume_from(self, earlier: RankSamples) -> None:
        """Begin with the epochs of an earlier process; its times stay its own."""
        self._epochs = list(earlier.epochs)
        self._losses = list(earlier.losses)
        self._hashes = list(earlier.sample_hashes)

    def publish_epoch(self) -> None:
        """Let the finished epoch be seen from outside."""
        self._observer.save(self.samples(), epoch_ended=True)

    def report_evaluation(self) -> None:
        """Beat during an evaluation."""
        self._report_phase(Phase.EVALUATING)

    def samples(self, **more: Any) -> RankSamples:
        """Everything noted so far; ``more`` are fields of RankSamples that others know."""
        return RankSamples(
            rank=self._rank,
            device=self.device,
            first_step_ms=self._first_step_ms,
            warmup_steps=self.length.warmup,
            windows=tuple(self._windows),
            slots=tuple(self._variant_indices),
            step_ms=tuple(self._step_ms),
            epochs=tuple(self._epochs),
            losses=tuple(self._losses),
            sample_hashes=tuple(self._hashes),
            **more,
        )

    def _begin_data_pass(self, epoch_scale: float = 1.0) -> None:
        made, self._epoch_first_step = self.steps - self._epoch_first_step, self.steps
        self._epoch_steps = round(epoch_scale * made)
        self._first_batch_requested_at = None
        self._start_window()
        self._first_batch_requested_at = self._window_start

    def _start_window(self) -> None:
        self._window_start = self._clock.start()
        if not self._epoch_steps:
            self._epoch_gap = None
            return
        seconds = self._window_start - self._last_end
        waited = (
            self._window_start - self._first_batch_requested_at
            if self._first_batch_requested_at is not None
            else 0.0
        )
        self._epoch_gap = EpochGap(seconds=seconds, steps=self._epoch_steps, waited_s=waited)

    def _report_step(self) -> None:
        self._report_phase(Phase.FIRST_STEP if self.steps == 0 else Phase.STEPPING)

    def _report_phase(self, phase: Phase) -> None:
        before = self.length.resumed_steps
        self._observer.beat(phase, before + self.steps, before + self.length.total)

    def _window_is_full(self, before: int) -> bool:
        return (
            before == 0
            or before < self.length.warmup <= self.steps
            or self._buffer.open_steps >= self.length.window
        )

    def _end_window(self, *, fenced: bool) -> None:
        if fenced or time.monotonic() - self._window_start >= self._fence_interval_s:
            self._close_window()
            self._start_window()
        else:
            self._cut_window()

    def _cut_window(self) -> None:
        if self._buffer.open_steps:
            self._buffer.end_window(
                self._variant_index, measured=not self._discarding, fetches=self._read_fetches()
            )

    def _close_window(self) -> None:
        if not self._buffer.calls:
            return
        self._cut_window()
        seconds, call_ms = self._clock.stop()
        self._last_end = self._window_start + seconds
        if self._first_step_ms is None and self.steps == self._buffer.steps:
            self._first_step_ms = 1e3 * seconds
        self._record_windows(seconds, call_ms)
        self._epoch_steps = 0
        self._read_losses()
        self._buffer.clear()
        self._observer.save(self.samples())

    def _record_windows(self, seconds: float, call_ms: Sequence[float]) -> None:
        made = self.steps - self._buffer.steps
        start_s, ahead_s = self._window_start, self._clock.ahead_s
        windows = self._buffer.timed_windows(
            made, start_s, seconds, call_ms, self._epoch_gap, ahead_s
        )
        for one in windows:
            if one.measured and one.window.first_step >= self.length.warmup:
                self._windows.append(one.window)
                self._variant_indices += [] if one.variant_index is None else [one.variant_index]
                self._step_ms += one.step_ms

    def _read_losses(self) -> None:
        calls = self._buffer.calls
        losses = self._read([call.loss for call in calls])
        if not losses:
            return
        last = self.length.resumed_steps + self.steps
        first = last - len(losses) + 1
        for step, loss in enumerate(losses, start=first):
            if not math.isfinite(loss):
                raise Diverged(f"the loss is {loss} in step {step}", step=step)
        counts = [call.count for call in calls for _ in range(call.steps)]
        terms = [loss * samples for loss, samples in zip(losses, counts, strict=True)]
        self._epoch_losses += terms
        if count := sum(counts):
            self._losses.append((last, sum(terms) / count))
