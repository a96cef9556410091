"""What a script does between the steps of its training: passes end and begin, or it is apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nfold.core.measurement import Epoch
from nfold.engines.base import Observer, Phase, Task
from nfold.engines.recorder import Recorder
from nfold.engines.step_clock import HostClock, StepClock
from nfold.engines.torch.devices import Devices, build_clock
from nfold.instrument.input.epoch_passes import truncated_sampler
from nfold.instrument.profilers import StackSampler
from nfold.instrument.run_length import agreed_value, planned_length, publish


class EpochBoundaryTracker:
    """Listens to what feeds a script, and keeps its passes and epochs out of the windows.

    Time between two passes over the training data belongs to no window, but stands beside the
    next one; in a run of whole epochs it belongs to the epoch before it, and ``full`` is called
    after the last. ``never_end`` has passes go on where what lies between them takes long, and
    ``loader`` is the one that feeds the training.
    """

    def __init__(
        self,
        task: Task,
        observer: Observer,
        recorder: Recorder[None],
        clock: DeferredDeviceClock,
        repeat_passes: Callable[[], None],
        training_loader: Callable[[], Any],
        on_last_epoch: Callable[[], None],
        host_gaps: HostGaps,
    ) -> None:
        self._task = task
        self._observer = observer
        self._recorder = recorder
        self._clock = clock
        self._training_loader = training_loader
        self._on_last_epoch = on_last_epoch
        self.gap_limit = EpochGapLimit(task, repeat_passes, self.on_other_batch)
        self._host_gaps = host_gaps
        self._pass_start_step = 0
        self._epoch_start_s: float | None = None
        self._epoch_end_s = 0.0
        self._epochs_completed = 0

    def on_pass_start(self, *, feeds_training: bool) -> None:
        """The first step is timed from the last pass that began before it.

        A pass in which no step was made was looked into only: the pause before it goes on.
        """
        self.on_other_batch()
        steps = self._recorder.steps
        if not steps:
            self._recorder.begin_epoch()
            self._epoch_start_s = time.monotonic()
        elif feeds_training and steps > self._pass_start_step:
            self._pass_start_step = steps
            self.gap_limit.on_pass_start()
            self._end_previous_pass()

    def _end_previous_pass(self) -> None:
        if self._task.plan.epochs is None:
            self._exclude_from_window(pass_ended=True)
            return
        self._end_epoch(time.monotonic())
        self._epoch_start_s = time.monotonic()

    def on_first_batch(self) -> None:
        """The start of workers lies between two passes."""
        self.gap_limit.on_first_batch()
        self._exclude_from_window()

    def _exclude_from_window(self, *, pass_ended: bool = False) -> None:
        self._clock.ends_with_step = True
        short = truncated_sampler(self._training_loader())
        self._recorder.exclude_gap(
            epoch_ended=pass_ended, epoch_scale=short.passes_per_epoch if short else 1.0
        )
        self._host_gaps.on_pass_start()

    def on_pass_end(self) -> None:
        """Where the script ends now, its last epoch did too."""
        self._epoch_end_s = time.monotonic()
        self._host_gaps.on_pass_end()

    def on_batch_request(self) -> None:
        """Of what is wanted for the training."""
        self._host_gaps.on_batch_request()

    def on_other_batch(self) -> None:
        """The script lives, though it makes no steps now."""
        steps = self._recorder.steps
        self._observer.beat(Phase.EVALUATING if steps else Phase.FIRST_STEP, steps)
        self._host_gaps.on_other_batch()

    def on_script_end(self, epochs_completed: int) -> None:
        """There are no more steps; so many passes were over, the last one perhaps only now."""
        if self._task.plan.epochs is not None and epochs_completed > self._epochs_completed:
            self._end_epoch(self._epoch_end_s)
        self._clock.ends_with_step = True
        self._recorder.end_epoch()

    def _end_epoch(self, now: float) -> None:
        self._clock.ends_with_step = True
        _, count = self._recorder.end_epoch()
        world = self._task.world_size
        seconds = now - (now if self._epoch_start_s is None else self._epoch_start_s)
        self._recorder.add_epoch(Epoch(seconds=seconds, samples=count * world, train_loss=None))
        self._epochs_completed += 1
        if self._epochs_completed == self._task.plan.epochs:
            self._on_last_epoch()
        self._recorder.begin_epoch()
        self._host_gaps.on_pass_start()


FENCE_INTERVAL_S = 2.0
"""From fence to fence. A host that makes 600 small all-reduces a step was 16 ms behind after each,
and five steps of 21 ms took 3 ms a step longer than 40 did."""


class DeferredDeviceClock:
    """The host's clock until ``know``; from the next window on, the devices' own."""

    def __init__(self) -> None:
        self._current: StepClock = HostClock()
        self._next: StepClock = self._current
        self._devices: Devices | None = None
        self.ends_with_step = False
        """Whether the window that is open ends with its last step, and not now."""
        self.ahead_s: float | None = None

    def set_devices(self, devices: Devices) -> None:
        """These are the devices; the window that is open is fenced by them at its end."""
        self._devices = devices
        self._next = build_clock(devices)

    def start(self) -> float:
        """As the clock in use."""
        self._current, self.ends_with_step = self._next, False
        return self._current.start()

    def mark(self) -> None:
        """As the clock in use."""
        self._current.mark()

    def stop(self) -> tuple[float, list[float]]:
        """As the clock in use, with everything done that was queued."""
        if self._devices is not None:
            self._devices.synchronize()
        seconds, call_ms = self._current.stop()
        self.ahead_s = None if self.ends_with_step else self._current.ahead_s
        return (sum(call_ms) / 1e3 if self.ends_with_step else seconds), call_ms


# Nobody waits long, and again and again, for what lies between the passes of a script.
#
# Ranks decide alike, by rank 0's clock, or they would wait for each other.

MAX_GAPS_S = 5.0
"""Between two passes that are cut short, of which a run holds three; in all between others."""
DECISION_KEY = "long after pass"


class EpochGapLimit:
    """What a rank waits for between passes, in a run that is measured in steps.

    A run of passes that are cut short ends with its first timed pass, if what was before that took
    long: it is a validation, most often. In another run no pass ends any more, from the next one
    on, once what lay between passes took long in all: ``never_end`` is called. ``waiting`` is
    called while rank 0 has not yet said which, because it may be in its validation.
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
        """A pass over the training data begins."""
        if not self._in_steps or self._passes_truncated or self._last_step_s is None:
            return
        self._pass_start_s = time.monotonic()
        self._gaps_s += self._pass_start_s - self._last_step_s
        self._passes += 1
        # What rank 0 said a pass ago is there by now: nobody waits for it.
        if self._is_decision_pass(self._passes - 1) and self._agreed(self._passes - 1):
            self._repeat_passes()
        if self._is_decision_pass(self._passes):
            self._publish(self._passes)

    def on_first_batch(self) -> None:
        """Its first batch is there, which was waited for."""
        self._gaps_s += time.monotonic() - self._pass_start_s if self._passes else 0.0

    def ends_run(self, steps: int) -> bool:
        """Whether step ``steps``, which has just been made, was the last one. Ask after each."""
        if not self._in_steps:
            return False
        before, self._last_step_s = self._last_step_s, time.monotonic()
        if not self._passes_truncated:
            return False
        if steps == self._pass_steps + 1 and before is not None:
            self._gaps_s = self._last_step_s - before
            self._publish(0)
        return steps == 2 * self._pass_steps and self._agreed(0)

    def _is_decision_pass(self, passes: int) -> bool:
        return passes > 0 and passes & (passes - 1) == 0

    def _publish(self, number: int) -> None:
        self._exceeded = self._gaps_s > MAX_GAPS_S
        publish(f"{DECISION_KEY} {number}", self._exceeded)

    def _agreed(self, number: int) -> bool:
        return agreed_value(f"{DECISION_KEY} {number}", self._exceeded, self._on_wait)


# How long a script does something else after a step, by its host: work that is not in every one.
#
# An evaluation every so many steps, a checkpoint, a log that one rank writes. What that costs a
# device tells; the host's time only says after which steps it was.


class HostGaps:
    """For every step the time from the end of the one before until a batch is asked for.

    With what is done apart from the training after that. Where nobody is seen to ask, or only after
    that, until a model trains on the batch that is there, or gradients are computed.
    ``whereabouts`` is told of all of it, and of what lies between passes.
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
        """Of every step so far."""
        return tuple(self._ms)

    @property
    def pass_starts(self) -> tuple[int, ...]:
        """The steps that passes began with, but for the first pass."""
        return tuple(self._pass_starts)

    def begin_gap(self) -> None:
        """A step is over."""
        self._sampler.begin_gap()
        self._reset()

    def _reset(self) -> None:
        self._gap_start_s = time.monotonic()
        self._request_s = self._other_work_start_s = None
        self._other_work_s = 0.0

    def on_pass_end(self) -> None:
        """A pass over the data is over; until another begins, all is between the two."""
        self._sampler.begin_gap()

    def on_pass_start(self) -> None:
        """A pass over the data begins: what was before it is no pause of a step."""
        self._pass_starts[len(self._ms)] = None
        self._sampler.end_gap(at_epoch_boundary=True)
        self._reset()
        self.on_batch_request()

    def on_batch_request(self) -> None:
        """A batch for the training is asked for: the first one ends the pause."""
        if self._request_s is None:
            self._request_s = time.monotonic()
            self._sampler.end_gap(at_epoch_boundary=False)

    def on_other_batch(self) -> None:
        """Something is seen that does not belong to the training; until a model trains."""
        if self._request_s is not None and self._other_work_start_s is None:
            self._other_work_start_s = time.monotonic()
            self._sampler.begin_gap()

    def on_compute(self) -> None:
        """A model trains on a batch from here on, or gradients are computed."""
        self.on_batch_request()
        if self._other_work_start_s is not None:
            self._other_work_s += time.monotonic() - self._other_work_start_s
            self._other_work_start_s = None
            self._sampler.end_gap(at_epoch_boundary=False)

    def end_step(self) -> None:
        """A step is over, and has had a pause."""
        self.on_compute()
        assert self._request_s is not None
        self._ms.append(round(1e3 * (self._request_s - self._gap_start_s + self._other_work_s), 4))
