"""What a script does between the steps of its training: passes end and begin, or it is apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nfold.frameworks.base import Observer, Phase, Task
from nfold.frameworks.recording import Recorder
from nfold.frameworks.torch.script.clock import DeferredDeviceClock
from nfold.frameworks.torch.script.ends import truncated_sampler
from nfold.frameworks.torch.script.patience import EpochGapLimit
from nfold.frameworks.torch.script.pauses import HostGaps
from nfold.measurement import Epoch


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
        """The one before."""
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
        """What lies between two passes is in no window."""
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
        """The one that began last, as long as it took until now."""
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
