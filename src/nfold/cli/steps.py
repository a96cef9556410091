"""Lines over the steps of a training: step, loss, images/s and seconds a batch, window by window.

Nothing here asks a rank for anything: a window that has closed is in its file, and so a line is of
whole windows, never of a step inside one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nfold.cli.screen import PlainScreen
from nfold.measurement import RankSamples
from nfold.run.handoff import HandoffFolder
from nfold.run.options import RunProgress


@dataclass(frozen=True)
class CompletedWindow:
    """A timed window of all ranks: its last step, its steps, samples, seconds and mean loss."""

    step: int
    steps: int
    samples: int
    seconds: float
    loss: float


def completed_windows(ranks: Sequence[RankSamples]) -> list[CompletedWindow]:
    """The windows that every rank has closed; the slowest rank's time, rank 0's mean loss.

    Losses are also kept of the warm-up, which has no windows: the last ones belong together.
    """
    if not ranks or not all(rank.windows for rank in ranks):
        return []
    losses = ranks[0].losses[-len(ranks[0].windows) :]
    windows = zip(*(rank.windows for rank in ranks), strict=False)
    return [
        CompletedWindow(
            step=step,
            steps=of_ranks[0].steps,
            samples=sum(window.samples for window in of_ranks),
            seconds=max(window.seconds for window in of_ranks),
            loss=loss,
        )
        for (step, loss), of_ranks in zip(losses, windows, strict=False)
    ]


def format_steps(windows: Sequence[CompletedWindow]) -> str:
    """Several windows as one: ``step 200, loss 0.512, 4,120 images/s, 0.0311 s/batch``."""
    steps = sum(window.steps for window in windows)
    seconds = sum(window.seconds for window in windows)
    loss = sum(window.loss * window.steps for window in windows) / steps
    rate = sum(window.samples for window in windows) / seconds
    return (
        f"step {windows[-1].step}, loss {loss:.4g}, {rate:,.1f} images/s, "
        f"{seconds / steps:.3g} s/batch"
    )


class StepProgress:
    """A line whenever windows of at least ``every`` steps have closed; 0: none."""

    def __init__(self, screen: PlainScreen, every: int) -> None:
        self._screen = screen
        self._every = every
        self._printed = 0
        self._folder: HandoffFolder | None = None
        self._changed_ns = 0

    def started(self, folder: Path) -> None:
        """The run's folder, where its ranks leave the windows that they have closed."""
        self._folder = HandoffFolder(folder) if self._every else None

    def progress(self, progress: RunProgress) -> None:
        """Print what has closed since the last call, where there is enough of it."""
        del progress
        changed_ns = 0 if self._folder is None else self._folder.samples_mtime_ns()
        if self._folder is None or changed_ns == self._changed_ns:
            return
        self._changed_ns = changed_ns
        self.print_completed(self._folder.read_samples())

    def print_completed(self, ranks: Sequence[RankSamples]) -> None:
        """Print the lines that are new in what the ranks have measured so far."""
        windows = completed_windows(ranks)
        end = self._printed
        for number in range(self._printed + 1, len(windows) + 1):
            if sum(window.steps for window in windows[end:number]) >= self._every:
                self._screen.print_line(format_steps(windows[end:number]))
                end = number
        self._printed = end

    def finished(self, ranks: Sequence[RankSamples]) -> None:
        """Print what is left, fewer steps than ``every`` as well."""
        if self._every:
            self.print_completed(ranks)
            left = completed_windows(ranks)[self._printed :]
            if left:
                self._screen.print_line(format_steps(left))
