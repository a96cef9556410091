"""What a rank records, also for calls of several steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import pytest

from nfold.core.errors import Diverged
from nfold.engines.base import Observer
from nfold.engines.recorder import Recorder, RunLength
from nfold.engines.step_clock import HostClock

Losses = list[float]


def _recorder(total: int, warmup: int) -> Recorder[Losses]:
    def read(kept: Sequence[Losses]) -> list[float]:
        return [loss for losses in kept for loss in losses]

    return Recorder(0, "cpu:0", HostClock(), Observer(), RunLength.from_steps(total, warmup), read)


def test_calls_of_several_steps_count_as_so_many() -> None:
    recorder = _recorder(12, 3)
    recorder.begin_epoch()
    for call in range(5):
        recorder.record_steps(2, 8, 2**63, [float(call), float(call) + 0.5])
    for _ in range(2):
        recorder.record_steps(1, 5, 1, [7.0])
    loss, count = recorder.end_epoch()
    samples = recorder.samples()
    assert (count, recorder.steps, recorder.done) == (90, 12, True)
    assert samples.sample_hashes == ((90, f"{(5 * 2**63 + 2) % 2**64:016x}"),)
    assert loss == sum(8 * (2 * call + 0.5) for call in range(5)) + 2 * 35
    assert sum(window.steps for window in samples.windows) == len(samples.step_ms) == 8
    assert sum(window.samples for window in samples.windows) == 3 * 16 + 10
    assert [step for step, _ in samples.losses][:2] == [2, 4]
    assert samples.first_step_ms is not None


def test_a_loss_that_is_no_number_names_its_step() -> None:
    recorder = _recorder(10, 1)
    recorder.begin_epoch()
    with pytest.raises(Diverged, match="step 2"):
        recorder.record_steps(3, 8, 0, [1.0, math.nan, 1.0])


def test_what_lies_between_two_epochs_belongs_to_the_first_window_of_the_second() -> None:
    recorder = _recorder(12, 1)
    for _ in range(2):
        recorder.begin_epoch()
        for _ in range(3):
            recorder.record_steps(1, 8, 1, [1.0])
        recorder.end_epoch()
        time.sleep(0.02)
    recorder.begin_epoch()
    recorder.record_steps(1, 8, 1, [1.0])
    time.sleep(0.01)
    recorder.exclude_gap(epoch_ended=True)
    recorder.record_steps(1, 8, 1, [1.0])
    recorder.begin_slot(0)
    recorder.record_steps(1, 8, 1, [1.0])
    recorder.end_epoch()
    windows = recorder.samples().windows
    found = [
        (window.epoch_gap.steps, window.epoch_gap.seconds) for window in windows if window.epoch_gap
    ]
    assert [steps for steps, _ in found] == [3, 3, 1]
    assert all(seconds >= least for (_, seconds), least in zip(found, (0.02, 0.02, 0), strict=True))
    assert windows[-1].epoch_gap is None


def test_of_what_lies_between_two_epochs_the_wait_for_a_first_batch_is_known() -> None:
    """From the moment when it is asked for: what the script does before that is its own."""
    recorder = _recorder(12, 1)
    recorder.begin_epoch()
    for _ in range(3):
        recorder.record_steps(1, 8, 1, [1.0])
    time.sleep(0.02)
    recorder.exclude_gap(epoch_ended=True)
    time.sleep(0.01)
    recorder.exclude_gap()
    recorder.record_steps(1, 8, 1, [1.0])
    recorder.end_epoch()
    between = recorder.samples().windows[-1].epoch_gap
    assert between is not None
    assert between.waited_s >= 0.01
    assert between.seconds - between.waited_s >= 0.02


class _FencedClock(HostClock):
    """Every step takes 10 ms; the first one after a fence 50 ms more."""

    def __init__(self) -> None:
        super().__init__()
        self.fences = 0
        self.calls = 0

    def start(self) -> float:
        self.fences, self.calls = self.fences + 1, 0
        return 100.0 * self.fences

    def mark(self) -> None:
        self.calls += 1

    def stop(self) -> tuple[float, list[float]]:
        call_ms = [60.0, *[10.0] * (self.calls - 1)]
        return sum(call_ms) / 1e3, call_ms

    @property
    def ahead_s(self) -> float:
        return 0.5


def _spanning(clock: _FencedClock, total: int, warmup: int) -> Recorder[None]:
    length = RunLength.from_steps(total, warmup)
    return Recorder(0, "gpu", clock, Observer(), length, lambda _: (), lambda: None, 1e6)


def test_windows_of_a_span_follow_each_other_without_a_fence() -> None:
    clock = _FencedClock()
    recorder = _spanning(clock, 34, 4)
    recorder.begin_epoch()
    for _ in range(34):
        recorder.record_steps(1, 8, 1, None)
    samples = recorder.samples()
    assert [window.steps for window in samples.windows] == [3] * 10
    # The 50 ms after the fence are in the warm-up, which the span began with.
    assert [window.seconds for window in samples.windows] == [pytest.approx(0.03)] * 10
    assert len(samples.step_ms) == 30
    starts = [window.start_s for window in samples.windows]
    assert starts == sorted(set(starts))
    assert [window.queue_drain_s for window in samples.windows] == [*[None] * 9, 0.5]
    # At the begin, after the first step, after the last.
    assert clock.fences == 3


def test_a_slot_begins_without_a_fence_after_the_steps_that_settle() -> None:
    clock = _FencedClock()
    recorder = _spanning(clock, 44, 4)
    recorder.begin_epoch()
    for _ in range(4):
        recorder.record_steps(1, 8, 1, None)
    for slot in (0, None, 1, None, 0):
        recorder.begin_slot(slot)
        for _ in range(2 if slot is None else 6):
            recorder.record_steps(1, 8, 1, None)
    recorder.end_epoch()
    samples = recorder.samples()
    assert samples.slots == (0, 0, 1, 1, 0, 0)
    assert [window.steps for window in samples.windows] == [4, 2, 4, 2, 4, 2]
    assert sum(window.seconds for window in samples.windows) == pytest.approx(0.18)
