"""What a person sees while a workload is trained: a line an epoch, a live line on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nfold.cli.progress import describe_progress, format_short_duration
from nfold.cli.screen import PlainScreen
from nfold.measurement import Epoch
from nfold.run.handoff import HandoffFolder
from nfold.run.options import RunProgress


def format_epoch(number: int, total: int, epoch: Epoch) -> str:
    """``epoch 3/10: loss 0.512, accuracy 0.8421, 3.2 s``."""
    accuracy = "" if epoch.accuracy is None else f", accuracy {epoch.accuracy:.4f}"
    loss = "" if epoch.train_loss is None else f" loss {epoch.train_loss:.3f}"
    return f"epoch {number}/{total}:{loss}{accuracy}, {epoch.seconds:.1f} s"


class StepTimer:
    """How long the steps that are left will take, as long as those that were seen."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def remaining_s(self, progress: RunProgress) -> float | None:
        """Seconds until the last step, None before two different steps were seen."""
        if not progress.step:
            return None
        self._first = self._first or (self._clock(), progress.step)
        began, step = self._first
        if progress.step == step:
            return None
        each = (self._clock() - began) / (progress.step - step)
        return each * max(0, progress.total - progress.step)


class EpochProgress:
    """A line for every epoch that ends, and a live one: epoch, step, rate, load, time left.

    ``total`` counts all epochs, ``before`` those of an earlier run.
    """

    def __init__(self, screen: PlainScreen, total: int, before: int = 0) -> None:
        self._screen = screen
        self._total = total
        self._seen = before
        self._pace = StepTimer()
        self._folder: HandoffFolder | None = None
        self._changed_ns = 0

    def started(self, folder: Path) -> None:
        """The run's folder, where its first rank tells what epochs it has finished."""
        self._folder = HandoffFolder(folder)

    def progress(self, progress: RunProgress) -> None:
        """Print what has ended since the last call, and draw the live line anew."""
        self.finished(self._read())
        words = [
            f"epoch {min(self._seen + 1, self._total)}/{self._total}",
            describe_progress(progress),
        ]
        left_s = self._pace.remaining_s(progress)
        if left_s is not None:
            words.append(f"{format_short_duration(left_s)} left")
        self._screen.show_live(" · ".join(words))

    def finished(self, epochs: Sequence[Epoch]) -> None:
        """Print those of all finished ``epochs`` that are new."""
        for number, epoch in enumerate(epochs[self._seen :], start=self._seen + 1):
            self._screen.print_line(format_epoch(number, self._total, epoch))
        self._seen = max(self._seen, len(epochs))

    def _read(self) -> Sequence[Epoch]:
        """The finished epochs, where something was written since the last look; else nothing."""
        if self._folder is None:
            return ()
        changed_ns = self._folder.samples_mtime_ns()
        if changed_ns == self._changed_ns:
            return ()
        self._changed_ns = changed_ns
        return self._folder.read_epochs()
