"""What a rank notes, also where one call makes several steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import pytest

from nfold.errors import Diverged
from nfold.frameworks.base import Observer
from nfold.frameworks.clock import HostClock
from nfold.frameworks.recording import Length, Recorder

Losses = list[float]


def _recorder(total: int, warmup: int) -> Recorder[Losses]:
    def read(kept: Sequence[Losses]) -> list[float]:
        return [loss for losses in kept for loss in losses]

    return Recorder(0, "cpu:0", HostClock(), Observer(), Length.of(total, warmup), read)


def test_calls_of_several_steps_count_as_so_many() -> None:
    recorder = _recorder(12, 3)
    recorder.begin()
    for call in range(5):
        recorder.made(2, 8, 2**63, [float(call), float(call) + 0.5])
    for _ in range(2):
        recorder.made(1, 5, 1, [7.0])
    loss, count = recorder.end()
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
    recorder.begin()
    with pytest.raises(Diverged, match="step 2"):
        recorder.made(3, 8, 0, [1.0, math.nan, 1.0])


def test_what_lies_between_two_epochs_stands_beside_the_first_window_of_the_second() -> None:
    recorder = _recorder(12, 1)
    for _ in range(2):
        recorder.begin()
        for _ in range(3):
            recorder.made(1, 8, 1, [1.0])
        recorder.end()
        time.sleep(0.02)
    recorder.begin()
    recorder.made(1, 8, 1, [1.0])
    time.sleep(0.01)
    recorder.apart(pass_ended=True)
    recorder.made(1, 8, 1, [1.0])
    recorder.take_turn(0)
    recorder.made(1, 8, 1, [1.0])
    recorder.end()
    windows = recorder.samples().windows
    found = [(window.between.steps, window.between.seconds) for window in windows if window.between]
    assert [steps for steps, _ in found] == [3, 3, 1]
    assert all(seconds >= least for (_, seconds), least in zip(found, (0.02, 0.02, 0), strict=True))
    assert windows[-1].between is None


def test_of_what_lies_between_two_epochs_the_wait_for_a_first_batch_is_known() -> None:
    """From the moment when it is asked for: what the script does before that is its own."""
    recorder = _recorder(12, 1)
    recorder.begin()
    for _ in range(3):
        recorder.made(1, 8, 1, [1.0])
    time.sleep(0.02)
    recorder.apart(pass_ended=True)
    time.sleep(0.01)
    recorder.apart()
    recorder.made(1, 8, 1, [1.0])
    recorder.end()
    between = recorder.samples().windows[-1].between
    assert between is not None
    assert between.waited_s >= 0.01
    assert between.seconds - between.waited_s >= 0.02
