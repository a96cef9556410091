"""What happens between the steps of a script: epoch boundaries and host gaps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nfold.core.measurement import Epoch
from nfold.engines.base import Observer, Phase, Task
from nfold.engines.recorder import Recorder
from nfold.engines.step_clock import HostClock, StepClock
from nfold.engines.torch.devices import Devices, build_clock
from nfold.instrument.input.epoch_passes import truncated_sampler
from nfold.instrument.profilers import StackSampler
from nfold.instrument.run_length import agreed_value, planned_length, publish


@dataclass(eq=False)
class EpochBoundaryTracker:
    """Keeps epoch boundaries out of the windows, and measures them.

    The time of an epoch boundary belongs to no window: it is recorded before the next window. In a
    run of whole epochs it belongs to the epoch before it, and ``on_last_epoch`` is called after the
    last.
    """

    task: Task
    observer: Observer
    recorder: Recorder[None]
    clock: DeferredDeviceClock
    repeat_passes: Callable[[], None]
    training_loader: Callable[[], Any]
    on_last_epoch: Callable[[], None]
    host_gaps: HostGaps

    def __post_init__(self) -> None:
        self.gap_limit = EpochGapLimit(self.task, self.repeat_passes, self.on_other_batch)
        self._pass_start_step = 0
        self._epoch_start_s: float | None = None
        self._epoch_end_s = 0.0
        self._epochs_completed = 0

    def on_pass_start(self, *, feeds_training: bool) -> None:
        """Begin a pass. The first step is timed from the last pass that began before it.

        A pass without a step (for an inspection of the data) does not end the host gap.
        """
        self.on_other_batch()
        steps = self.recorder.steps
        if not steps:
            self.recorder.begin_epoch()
            self._epoch_start_s = time.monotonic()
        elif feeds_training and steps > self._pass_start_step:
            self._pass_start_step = steps
            self.gap_limit.on_pass_start()
            if self.task.plan.epochs is None:
                self._exclude_from_window(pass_ended=True)
            else:
                self._end_epoch(time.monotonic())
                self._epoch_start_s = time.monotonic()

    def on_first_batch(self) -> None:
        """End the start of workers, which belongs to the epoch boundary."""
        self.gap_limit.on_first_batch()
        self._exclude_from_window()

    def _exclude_from_window(self, *, pass_ended: bool = False) -> None:
        self.clock.ends_with_step = True
        truncated = truncated_sampler(self.training_loader())
        scale = truncated.passes_per_epoch if truncated else 1.0
        self.recorder.exclude_gap(epoch_ended=pass_ended, epoch_scale=scale)
        self.host_gaps.on_pass_start()

    def on_pass_end(self) -> None:
        """Remember the time: if the script ends now, its last epoch ended too."""
        self._epoch_end_s = time.monotonic()
        self.host_gaps.on_pass_end()

    def on_batch_request(self) -> None:
        self.host_gaps.on_batch_request()

    def on_other_batch(self) -> None:
        """Report progress without a step, such as an evaluation."""
        steps = self.recorder.steps
        self.observer.beat(Phase.EVALUATING if steps else Phase.FIRST_STEP, steps)
        self.host_gaps.on_other_batch()

    def on_script_end(self, epochs_completed: int) -> None:
        if self.task.plan.epochs is not None and epochs_completed > self._epochs_completed:
            self._end_epoch(self._epoch_end_s)
        self.clock.ends_with_step = True
        self.recorder.end_epoch()

    def _end_epoch(self, now: float) -> None:
        self.clock.ends_with_step = True
        _, count = self.recorder.end_epoch()
        world = self.task.world_size
        seconds = now - (now if self._epoch_start_s is None else self._epoch_start_s)
        self.recorder.add_epoch(Epoch(seconds=seconds, samples=count * world, train_loss=None))
        self._epochs_completed += 1
        if self._epochs_completed == self.task.plan.epochs:
            self.on_last_epoch()
        self.recorder.begin_epoch()
        self.host_gaps.on_pass_start()


# Between synchronizations with the device. A host with 600 small all-reduces per step was 16 ms
# behind after each, and five steps of 21 ms took 3 ms per step longer than 40 did.
FENCE_INTERVAL_S = 2.0


class DeferredDeviceClock:
    """A host clock until ``set_devices``; from the next window on a clock of the devices."""

    def __init__(self) -> None:
        self._current: StepClock = HostClock()
        self._next: StepClock = self._current
        self._devices: Devices | None = None
        self.ends_with_step = False  # whether the window ends with its last step, not now
        self.ahead_s: float | None = None

    def set_devices(self, devices: Devices) -> None:
        self._devices = devices
        self._next = build_clock(devices)

    def start(self) -> float:
        self._current, self.ends_with_step = self._next, False
        return self._current.start()

    def mark(self) -> None:
        self._current.mark()

    def stop(self) -> tuple[float, list[float]]:
        if self._devices is not None:
            self._devices.synchronize()
        seconds, call_ms = self._current.stop()
        self.ahead_s = None if self.ends_with_step else self._current.ahead_s
        return (sum(call_ms) / 1e3 if self.ends_with_step else seconds), call_ms


MAX_GAPS_S = 5.0  # of one boundary with truncated passes, else of all
DECISION_KEY = "long after pass"


class EpochGapLimit:
    """Limits the time that a rank spends at epoch boundaries in a run that is measured in steps.

    All ranks decide by the clock of rank 0: otherwise they would wait for each other. A run of
    truncated passes ends with its first timed pass if the time before it was long, as with a
    validation. In other runs no later pass ends once the boundaries took long in total:
    ``repeat_passes`` is called. ``on_wait`` is called while rank 0 has not decided, because it may
    be in its validation.
    """

    def __init__(
        self, task: Task, repeat_passes: Callable[[], None], on_wait: Callable[[], None]
    ) -> None:
        self._repeat_passes = repeat_passes
        self._on_wait = on_wait
        self._passes_truncated = task.variant.batches_per_epoch is not None
        self._in_steps = task.plan.steps is not None
        self._pass_steps = planned_length(task).warmup
        self._passes = 0
        self._exceeded = False
        self._gaps_s = 0.0
        self._last_step_s: float | None = None
        self._pass_start_s = 0.0

    def on_pass_start(self) -> None:
        if not self._in_steps or self._passes_truncated or self._last_step_s is None:
            return
        self._pass_start_s = time.monotonic()
        self._gaps_s += self._pass_start_s - self._last_step_s
        self._passes += 1
        # Rank 0 published this decision one pass ago: no rank waits for it.
        if self._is_decision_pass(self._passes - 1) and self._agreed(self._passes - 1):
            self._repeat_passes()
        if self._is_decision_pass(self._passes):
            self._publish(self._passes)

    def on_first_batch(self) -> None:
        self._gaps_s += time.monotonic() - self._pass_start_s if self._passes else 0.0

    def ends_run(self, steps: int) -> bool:
        """Return whether step ``steps`` was the last. Call after each step."""
        if not self._in_steps:
            return False
        previous_s, self._last_step_s = self._last_step_s, time.monotonic()
        if not self._passes_truncated:
            return False
        if steps == self._pass_steps + 1 and previous_s is not None:
            self._gaps_s = self._last_step_s - previous_s
            self._publish(0)
        return steps == 2 * self._pass_steps and self._agreed(0)

    def _is_decision_pass(self, passes: int) -> bool:
        return passes > 0 and passes & (passes - 1) == 0  # powers of two

    def _publish(self, number: int) -> None:
        self._exceeded = self._gaps_s > MAX_GAPS_S
        publish(f"{DECISION_KEY} {number}", self._exceeded)

    def _agreed(self, number: int) -> bool:
        return agreed_value(f"{DECISION_KEY} {number}", self._exceeded, self._on_wait)


class HostGaps:
    """Measures the host gap of every step, from the end of the last step to a batch request.

    Work apart from the training after the request, such as an evaluation, counts too. Without a
    request the gap ends when a model trains or a backward begins. The times of the host only show
    after which steps there was other work; its cost is measured on the device. ``sampler`` samples
    all gaps.
    """

    def __init__(self, sampler: StackSampler) -> None:
        self._sampler = sampler
        self._ms: list[float] = []
        self._pass_starts: dict[int, None] = {}
        self._gap_start_s = time.monotonic()
        self._request_s: float | None = None
        self._other_work_start_s: float | None = None
        self._other_work_s = 0.0

    @property
    def ms(self) -> tuple[float, ...]:
        return tuple(self._ms)

    @property
    def pass_starts(self) -> tuple[int, ...]:
        """The steps that begin a pass, except the first pass."""
        return tuple(self._pass_starts)

    def begin_gap(self) -> None:
        self._sampler.begin_gap()
        self._reset()

    def _reset(self) -> None:
        self._gap_start_s = time.monotonic()
        self._request_s = self._other_work_start_s = None
        self._other_work_s = 0.0

    def on_pass_end(self) -> None:
        self._sampler.begin_gap()

    def on_pass_start(self) -> None:
        """End the epoch boundary: the time before it is not the gap of a step."""
        self._pass_starts[len(self._ms)] = None
        self._sampler.end_gap(at_epoch_boundary=True)
        self._reset()
        self.on_batch_request()

    def on_batch_request(self) -> None:
        if self._request_s is None:
            self._request_s = time.monotonic()
            self._sampler.end_gap(at_epoch_boundary=False)

    def on_other_batch(self) -> None:
        """Begin other work: a batch that does not feed the training."""
        if self._request_s is not None and self._other_work_start_s is None:
            self._other_work_start_s = time.monotonic()
            self._sampler.begin_gap()

    def on_compute(self) -> None:
        self.on_batch_request()
        if self._other_work_start_s is not None:
            self._other_work_s += time.monotonic() - self._other_work_start_s
            self._other_work_start_s = None
            self._sampler.end_gap(at_epoch_boundary=False)

    def end_step(self) -> None:
        self.on_compute()
        assert self._request_s is not None
        self._ms.append(round(1e3 * (self._request_s - self._gap_start_s + self._other_work_s), 4))
