"""What one rank records: the length of its run, windows, steps, losses, hashes, heartbeats."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nfold.core.errors import Diverged
from nfold.core.interleave import round_to_loader_cycle
from nfold.core.measurement import Epoch, EpochGap, FetchStats, RankSamples, Window
from nfold.core.plan import Plan
from nfold.engines.base import Observer, Phase
from nfold.engines.step_clock import StepClock

TARGET_WINDOWS = 10
MAX_WINDOW_STEPS = 500
MIN_WINDOWS = 5  # fewer windows show too little of their variation


@dataclass(frozen=True)
class RunLength:
    """Steps of a run, of its warm-up and of a window.

    ``resumed_steps`` were made by an earlier process; the other fields do not count them.
    """

    total: int
    warmup: int
    window: int
    resumed_steps: int = 0

    @classmethod
    def from_steps(cls, total: int, warmup: int, resumed_steps: int = 0) -> RunLength:
        """Warm up for at least one step and at most half; cut the others into about ten windows."""
        warmup = min(max(1, warmup), total // 2)
        window = min(max(1, math.ceil((total - warmup) / TARGET_WINDOWS)), MAX_WINDOW_STEPS)
        return cls(total, warmup, window, resumed_steps)

    def in_loader_cycles(self, plan: Plan, max_steps: int) -> RunLength:
        """Return it with windows of whole cycles of the plan's loader, up to ``max_steps`` each."""
        return dataclasses.replace(self, window=round_to_loader_cycle(self.window, plan, max_steps))


def plan_length(plan: Plan, total: int, resumed_steps: int = 0) -> RunLength:
    """Return the length of ``total`` steps, with warm-up, in whole loader cycles if they are enough."""
    warmup = plan.warmup_steps or 0
    return RunLength.from_steps(total, warmup, resumed_steps).in_loader_cycles(
        plan, max_steps=(total - warmup) // MIN_WINDOWS
    )


def checksum(contents: Iterable[bytes]) -> str:
    """Return the first 16 hex digits of the SHA-256 of all parameters' bytes."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()[:16]


Loss = TypeVar("Loss")


@dataclass(frozen=True)
class CompletedCall(Generic[Loss]):
    """A call of ``steps`` steps of ``count`` samples each, whose losses were not read yet."""

    loss: Loss
    steps: int
    count: int
    batch_index: int | None


@dataclass(frozen=True)
class _WindowEnd:
    calls: int
    variant_index: int | None
    measured: bool
    fetches: FetchStats | None
    exchange_wait_s: float | None


def _batch_indices(calls: Sequence[CompletedCall[Loss]]) -> tuple[int, ...]:
    known = [(call.batch_index, call.steps) for call in calls if call.batch_index is not None]
    return tuple(i for i, n in known for _ in range(n)) if len(known) == len(calls) else ()


HASH_BITS = 64

# Reads the losses of all steps, in order, from what the framework returned.
ReadLosses = Callable[[Sequence[Loss]], Sequence[float]]


@dataclass(eq=False)
class Recorder(Generic[Loss]):
    """Records one rank's run. Call ``begin_epoch``, ``record_steps`` after each call, ``end_epoch``.

    Inside a window only the clock's mark touches the device: losses stay tensors of the framework
    and are read after the window's fence.

    ``length`` may change until the warm-up ends. ``read_fetches`` returns statistics of the batches
    fetched since its last call. Fences are ``fence_interval_s`` seconds apart: after a fence the
    device waits for the host, which it does not in a training without fences.
    ``read_exchange_wait`` returns the seconds that the rank has waited for the gradient exchange
    since its last call. ``read_batch_index`` returns the number of the replayed batch of the last
    call, None if it was a real one.
    """

    rank: int
    device: str
    clock: StepClock
    observer: Observer
    length: RunLength
    read: ReadLosses[Loss]
    read_fetches: Callable[[], FetchStats | None] = lambda: None
    fence_interval_s: float = 0.0
    read_exchange_wait: Callable[[], float | None] = lambda: None
    read_batch_index: Callable[[], int | None] = lambda: None

    def __post_init__(self) -> None:
        # Calls, and the ends of windows, since the last fence.
        self._calls: list[CompletedCall[Loss]] = []
        self._window_ends: list[_WindowEnd] = []
        self._open_steps = 0
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
        return self.steps >= self.length.total

    def begin_epoch(self) -> None:
        self._epoch_hash, self._epoch_losses = (0, 0), []
        self._report_step()
        self._begin_data_pass()

    def record_steps(self, steps: int, count: int, sample_hash: int, loss: Loss) -> None:
        """Record a call of ``steps`` steps of ``count`` samples each.

        Ends the window if it is full, after the warm-up and after the first step.

        ``sample_hash`` is of all their samples; ``loss`` holds one loss per step.
        """
        self.clock.mark()
        before, self.steps = self.steps, self.steps + steps
        self._calls.append(CompletedCall(loss, steps, count, self.read_batch_index()))
        self._open_steps += steps
        counted, total = self._epoch_hash
        self._epoch_hash = (counted + steps * count, (total + sample_hash) % 2**HASH_BITS)
        self._report_step()
        if (
            before == 0
            or before < self.length.warmup <= self.steps
            or self._open_steps >= self.length.window
        ):
            self._end_window(fenced=before == 0 or self.done)

    def exclude_gap(self, *, epoch_ended: bool = False, epoch_scale: float = 1.0) -> None:
        """Leave the time since the last step out of all windows and begin the next window now.

        Args:
            epoch_ended: A pass over the data ended since that step; the time up to the next call
                of this method is an epoch gap, and includes the wait for the first batch.
            epoch_scale: Length of a full pass over the length of this one.
        """
        self._close_window()
        if epoch_ended:
            self._begin_data_pass(epoch_scale)
        else:
            self._start_window()

    def begin_slot(self, variant_index: int | None) -> None:
        """End the window and begin a slot of a variant; steps of the slot None are discarded."""
        self._epoch_steps = 0
        self._end_window(fenced=variant_index is None)
        self._variant_index, self._discarding = variant_index, variant_index is None

    def end_epoch(self) -> tuple[float, int]:
        """End an epoch; return this rank's sum of losses over its samples, and their number.

        The sum does not depend on the windows.
        """
        self._close_window()
        count, total = self._epoch_hash
        self._hashes.append((count, f"{total:016x}"))
        return math.fsum(self._epoch_losses), count

    def add_epoch(self, epoch: Epoch) -> None:
        self._epochs.append(epoch)

    def resume_from(self, earlier: RankSamples) -> None:
        """Begin with the epochs, losses and hashes of an earlier process."""
        self._epochs = list(earlier.epochs)
        self._losses = list(earlier.losses)
        self._hashes = list(earlier.sample_hashes)

    def publish_epoch(self) -> None:
        self.observer.save(self.samples(), epoch_ended=True)

    def report_evaluation(self) -> None:
        self._report_phase(Phase.EVALUATING)

    def samples(self, **more: Any) -> RankSamples:
        """Return everything recorded so far; ``more`` are further fields of RankSamples."""
        return RankSamples(
            rank=self.rank,
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
        done, self._epoch_first_step = self.steps - self._epoch_first_step, self.steps
        self._epoch_steps = round(epoch_scale * done)
        self._first_batch_requested_at = None
        self._start_window()
        self._first_batch_requested_at = self._window_start

    def _start_window(self) -> None:
        self._window_start = self.clock.start()
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
        self.observer.beat(phase, before + self.steps, before + self.length.total)

    def _end_window(self, *, fenced: bool) -> None:
        if fenced or time.monotonic() - self._window_start >= self.fence_interval_s:
            self._close_window()
            self._start_window()
        else:
            self._cut_window()

    def _cut_window(self) -> None:
        if self._open_steps:
            end = _WindowEnd(
                calls=len(self._calls),
                variant_index=self._variant_index,
                measured=not self._discarding,
                fetches=self.read_fetches(),
                exchange_wait_s=self.read_exchange_wait(),
            )
            self._window_ends.append(end)
            self._open_steps = 0

    def _close_window(self) -> None:
        if not self._calls:
            return
        self._cut_window()
        seconds, call_ms = self.clock.stop()
        self._last_end = self._window_start + seconds
        first_step = self.steps - sum(call.steps for call in self._calls)
        if self._first_step_ms is None and not first_step:
            self._first_step_ms = 1e3 * seconds
        self._record_windows(first_step, call_ms)
        self._epoch_steps = 0
        self._read_losses()
        self._calls.clear()
        self._window_ends.clear()
        self.observer.save(self.samples())

    def _record_windows(self, first_step: int, call_ms: Sequence[float]) -> None:
        """Record the windows since the last fence; ``first_step`` steps were made before."""
        first, start_s = 0, self._window_start
        for end in self._window_ends:
            calls, times_ms = self._calls[first : end.calls], call_ms[first : end.calls]
            last = end is self._window_ends[-1]
            window = Window(
                start_s=start_s,
                seconds=self._last_end - start_s if last else sum(times_ms) / 1e3,
                steps=sum(call.steps for call in calls),
                samples=sum(call.steps * call.count for call in calls),
                first_step=first_step,
                fetches=end.fetches,
                epoch_gap=None if first else self._epoch_gap,
                queue_drain_s=self.clock.ahead_s if last else None,
                exchange_wait_s=end.exchange_wait_s,
                batch_indices=_batch_indices(calls),
            )
            pairs = zip(times_ms, calls, strict=True)
            step_ms = [ms / call.steps for ms, call in pairs for _ in range(call.steps)]
            if end.measured and first_step >= self.length.warmup:
                self._windows.append(window)
                if end.variant_index is not None:
                    self._variant_indices.append(end.variant_index)
                self._step_ms += step_ms
            first, first_step = end.calls, first_step + window.steps
            start_s += window.seconds

    def _read_losses(self) -> None:
        calls = self._calls
        losses = self.read([call.loss for call in calls])
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
