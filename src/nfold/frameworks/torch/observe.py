"""What one rank notes while it trains: windows, steps, losses, sample hashes, heartbeats.

Inside a window nothing here touches the device except an event per step: losses are kept as
device tensors and read after the window's closing fence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nfold.errors import Diverged
from nfold.frameworks.base import Observer, Phase
from nfold.frameworks.torch.batch import Batch
from nfold.frameworks.torch.clock import Clock
from nfold.measurement import Epoch, RankSamples, Window

WINDOWS = 10
LONGEST_WINDOW = 500
HASH_BITS = 64


@dataclass(frozen=True)
class Length:
    """How many steps a run has, how many of them warm up, how many make a window.

    ``before`` steps were made by an earlier process, and are not counted in the others.
    """

    total: int
    warmup: int
    window: int
    before: int = 0

    @classmethod
    def of(cls, total: int, warmup: int, before: int = 0) -> Length:
        """Between one step and half of them warm up; the rest is cut into about ten windows."""
        warmup = min(max(1, warmup), total // 2)
        window = min(max(1, math.ceil((total - warmup) / WINDOWS)), LONGEST_WINDOW)
        return cls(total, warmup, window, before)


class Recorder:
    """One rank's notes. Call ``begin``, then ``step`` after each step, then ``end``."""

    def __init__(
        self, rank: int, device: str, clock: Clock, observer: Observer, length: Length
    ) -> None:
        self._rank = rank
        self._device = device
        self._clock = clock
        self._observer = observer
        self._length = length
        self._pending: list[tuple[Tensor, int]] = []
        self._window_start = 0.0
        self._windows: list[Window] = []
        self._step_ms: list[float] = []
        self._losses: list[tuple[int, float]] = []
        self._epochs: list[Epoch] = []
        self._hashes: list[tuple[int, str]] = []
        self._epoch_hash = (0, 0)
        self._epoch_losses: list[float] = []
        self._first_step_ms: float | None = None
        self.steps = 0

    @property
    def done(self) -> bool:
        """Whether all planned steps were made."""
        return self.steps >= self._length.total

    def begin(self) -> None:
        """Begin an epoch: fence, and start a window."""
        self._epoch_hash = (0, 0)
        self._epoch_losses = []
        self._beat()
        self._window_start = self._clock.start()

    def step(self, batch: Batch, loss: Tensor) -> None:
        """Note one step; close the window where it is full, warm-up ends, or it was the first."""
        self._clock.mark()
        self.steps += 1
        self._pending.append((loss, batch.count))
        count, total = self._epoch_hash
        self._epoch_hash = (count + batch.count, (total + batch.sample_hash) % 2**HASH_BITS)
        self._beat()
        if self._window_is_full():
            self._close_window()
            self._window_start = self._clock.start()

    def end(self) -> tuple[float, int]:
        """End an epoch; returns this rank's sum of losses over its samples, and their number.

        The sum does not depend on how the epoch was cut into windows.
        """
        self._close_window()
        count, total = self._epoch_hash
        self._hashes.append((count, f"{total:016x}"))
        return math.fsum(self._epoch_losses), count

    def epoch(self, epoch: Epoch) -> None:
        """Add a finished epoch, as all ranks together saw it."""
        self._epochs.append(epoch)

    def go_on(self, earlier: RankSamples) -> None:
        """Begin with the epochs of an earlier process; its times stay its own."""
        self._epochs = list(earlier.epochs)
        self._losses = list(earlier.losses)
        self._hashes = list(earlier.sample_hashes)

    def tell(self) -> None:
        """Let the finished epoch be seen from outside."""
        self._observer.save(self.samples(), epoch_ended=True)

    def evaluating(self) -> None:
        """Beat during an evaluation."""
        self._tell_phase(Phase.EVALUATING)

    def samples(
        self,
        *,
        peak_memory_bytes: int | None = None,
        data_bytes: int | None = None,
        graph_bytes: int | None = None,
        notes: tuple[tuple[str, str], ...] = (),
        parameter_checksum: str | None = None,
        parameter_count: int | None = None,
    ) -> RankSamples:
        """Everything noted so far."""
        return RankSamples(
            rank=self._rank,
            device=self._device,
            first_step_ms=self._first_step_ms,
            warmup_steps=self._length.warmup,
            windows=tuple(self._windows),
            step_ms=tuple(self._step_ms),
            epochs=tuple(self._epochs),
            losses=tuple(self._losses),
            peak_memory_bytes=peak_memory_bytes,
            data_bytes=data_bytes,
            graph_bytes=graph_bytes,
            notes=notes,
            sample_hashes=tuple(self._hashes),
            parameter_checksum=parameter_checksum,
            parameter_count=parameter_count,
        )

    def _beat(self) -> None:
        self._tell_phase(Phase.FIRST_STEP if self.steps == 0 else Phase.STEPPING)

    def _tell_phase(self, phase: Phase) -> None:
        before = self._length.before
        self._observer.beat(phase, before + self.steps, before + self._length.total)

    def _window_is_full(self) -> bool:
        return (
            self.steps == 1
            or self.steps == self._length.warmup
            or len(self._pending) >= self._length.window
        )

    def _close_window(self) -> None:
        """Fence, then read times and losses; windows of the warm-up are not kept."""
        if not self._pending:
            return
        seconds, step_ms = self._clock.stop()
        count = sum(samples for _, samples in self._pending)
        if self.steps == 1:
            self._first_step_ms = 1e3 * seconds
        if self.steps > self._length.warmup:
            window = Window(
                start_s=self._window_start, seconds=seconds, steps=len(step_ms), samples=count
            )
            self._windows.append(window)
            self._step_ms.extend(step_ms)
        self._read_losses(count)
        self._observer.save(self.samples())

    def _read_losses(self, count: int) -> None:
        losses = torch.stack([loss for loss, _ in self._pending]).tolist()
        last = self._length.before + self.steps
        first = last - len(losses) + 1
        for step, loss in enumerate(losses, start=first):
            if not math.isfinite(loss):
                raise Diverged(f"the loss is {loss} in step {step}", step=step)
        pairs = zip(losses, self._pending, strict=True)
        terms = [loss * samples for loss, (_, samples) in pairs]
        self._epoch_losses += terms
        if count:
            self._losses.append((last, sum(terms) / count))
        self._pending.clear()
