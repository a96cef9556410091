"""What a script does between the steps of its training: passes end and begin, or it is apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nfold.frameworks.base import Observer, Phase, Task
from nfold.frameworks.recording import Recorder
from nfold.frameworks.torch.script.clock import LateClock
from nfold.frameworks.torch.script.ends import shortened
from nfold.frameworks.torch.script.patience import Patience
from nfold.frameworks.torch.script.pauses import Pauses
from nfold.measurement import Epoch


class BetweenSteps:
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
        clock: LateClock,
        never_end: Callable[[], None],
        loader: Callable[[], Any],
        full: Callable[[], None],
        pauses: Pauses,
    ) -> None:
        self._task = task
        self._observer = observer
        self._recorder = recorder
        self._clock = clock
        self._loader = loader
        self._full = full
        self.patience = Patience(task, never_end, self.aside)
        self._pauses = pauses
        self._began_at = 0
        self._epoch_began: float | None = None
        self._epoch_ended = 0.0
        self._epochs = 0

    def pass_begins(self, *, feeds: bool) -> None:
        """The first step is timed from the last pass that began before it.

        A pass in which no step was made was looked into only: the pause before it goes on.
        """
        self.aside()
        steps = self._recorder.steps
        if not steps:
            self._recorder.begin()
            self._epoch_began = time.monotonic()
        elif feeds and steps > self._began_at:
            self._began_at = steps
            self.patience.pass_begins()
            self._pass_over()

    def _pass_over(self) -> None:
        """The one before."""
        if self._task.plan.epochs is None:
            self._apart(pass_ended=True)
            return
        self._end_epoch(time.monotonic())
        self._epoch_began = time.monotonic()

    def pass_began(self) -> None:
        """The start of workers lies between two passes."""
        self.patience.pass_began()
        self._apart()

    def _apart(self, *, pass_ended: bool = False) -> None:
        """What lies between two passes is in no window."""
        self._clock.ends_with_step = True
        short = shortened(self._loader())
        self._recorder.apart(pass_ended=pass_ended, times=short.times if short else 1.0)
        self._pauses.begin_pass()

    def pass_ended(self) -> None:
        """Where the script ends now, its last epoch did too."""
        self._epoch_ended = time.monotonic()
        self._pauses.pass_ended()

    def asked(self) -> None:
        """Of what is wanted for the training."""
        self._pauses.asked()

    def aside(self) -> None:
        """The script lives, though it makes no steps now."""
        steps = self._recorder.steps
        self._observer.beat(Phase.EVALUATING if steps else Phase.FIRST_STEP, steps)
        self._pauses.apart()

    def script_ended(self, epochs_ended: int) -> None:
        """There are no more steps; so many passes were over, the last one perhaps only now."""
        if self._task.plan.epochs is not None and epochs_ended > self._epochs:
            self._end_epoch(self._epoch_ended)
        self._clock.ends_with_step = True
        self._recorder.end()

    def _end_epoch(self, now: float) -> None:
        """The one that began last, as long as it took until now."""
        self._clock.ends_with_step = True
        _, count = self._recorder.end()
        world = self._task.world_size
        seconds = now - (now if self._epoch_began is None else self._epoch_began)
        self._recorder.epoch(Epoch(seconds=seconds, samples=count * world, train_loss=None))
        self._epochs += 1
        if self._epochs == self._task.plan.epochs:
            self._full()
        self._recorder.begin()
        self._pauses.begin_pass()
