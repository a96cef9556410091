"""What a person sees while a sweep runs: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nfold.analysis.cells import Cell, samples_per_s
from nfold.bench.sweep import CellRun, SweepEvents
from nfold.cli.terminal import PlainScreen
from nfold.core.format import terminal_safe
from nfold.core.measurement import Epoch, Measurement, RankSamples
from nfold.explain.advice.trial_names import name_trial
from nfold.explain.attribution import build_budget
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.experiment import ExperimentEvents
from nfold.explain.result.view import build_view
from nfold.explain.trials import TrialResults
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import RunProgress


def format_short_duration(seconds: float) -> str:
    """Whole seconds as ``8 s``, ``2:05`` or ``1:02:05``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def describe_cell(cell_run: CellRun) -> str:
    """A cell in a few words: ``cnn10 · 2 cuda devices · ddp · batch 512``."""
    workload, label = str(cell_run.cell.workload), cell_run.cell.label
    name = workload if label == workload else f"{workload} · {label}"
    return terminal_safe(f"{name} · repeat {cell_run.repeat + 1}" if cell_run.repeat else name)


def describe_measurement(measurement: Measurement) -> str:
    """What came out, in a few words: a rate, or a status with its cause."""
    rate = samples_per_s(Cell(measurements=(measurement,)))
    if measurement.status == "ok" and rate is not None:
        return f"{rate.value:,.0f} images/s"
    cause = f": {measurement.cause.text}" if measurement.cause else ""
    return terminal_safe(f"{measurement.status}{cause}")


class RemainingTime:
    """What is left of a sweep: its estimates, set right by how long its runs really took.

    ``estimates_s`` holds one entry per run, in the order of the runs. ``clock`` is monotonic.
    """

    def __init__(
        self, estimates_s: Sequence[float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._estimates_s = estimates_s
        self._clock = clock
        self._began = clock()
        self._ended = self._began
        self._finished = 0

    @property
    def total_runs(self) -> int:
        """How many runs there are in all."""
        return len(self._estimates_s)

    def record_finished(self) -> None:
        """One more run has ended."""
        self._finished += 1
        self._ended = self._clock()

    def estimate_s(self) -> float:
        """For the run that goes on and the ones after it."""
        before = sum(self._estimates_s[: self._finished])
        after = sum(self._estimates_s[self._finished :])
        right = (self._ended - self._began) / before if before else 1.0
        return max(0.0, right * after - (self._clock() - self._ended))


class SweepProgress(SweepEvents):
    """One line a finished cell, and two live ones: cells, time left; step, rate, device load."""

    def __init__(self, screen: PlainScreen, left: RemainingTime) -> None:
        self._number, self._total = 0, left.total_runs
        self._screen = screen
        self._left = left
        self._cell_run: CellRun | None = None

    def cell_started(self, turn: CellRun) -> None:
        self._cell_run = turn
        self._number += 1
        self.progress(RunProgress(phase="starting", step=0, total=0))

    def progress(self, progress: RunProgress) -> None:
        assert self._cell_run is not None
        left = format_short_duration(self._left.estimate_s())
        head = f"{self._number}/{self._total} cells · {left} left · {describe_cell(self._cell_run)}"
        self._screen.show_live(head, f"  {describe_progress(progress)}")

    def cell_finished(self, turn: CellRun, measurement: Measurement) -> None:
        self._left.record_finished()
        self._screen.print_line(self._line(turn, measurement))

    def _line(self, turn: CellRun, measurement: Measurement) -> str:
        number, total = self._number, self._total
        left = format_short_duration(self._left.estimate_s())
        ending = f", {left} left" if number < total else ""
        took = format_short_duration(measurement.wall_seconds)
        name = describe_cell(turn)
        return f"[{number}/{total}] {name}: {describe_measurement(measurement)} ({took}{ending})"


def describe_progress(progress: RunProgress) -> str:
    """``stepping · step 120/500 · 41,200 images/s · device load 97 %``."""
    words = [progress.phase]
    if progress.step:
        words.append(f"step {progress.step}" + (f"/{progress.total}" if progress.total else ""))
    if progress.samples_per_s is not None:
        words.append(f"{progress.samples_per_s:,.0f} images/s")
    if progress.device_load is not None:
        words.append(f"device load {progress.device_load:.0f} %")
    return " · ".join(words)


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
        if self._folder is None:
            return ()
        changed_ns = self._folder.samples_mtime_ns()
        if changed_ns == self._changed_ns:
            return ()
        self._changed_ns = changed_ns
        return self._folder.read_epochs()


# Lines over the steps of a training: step, loss, images/s and seconds a batch, window by window.
#
# Nothing here asks a rank for anything: a window that has closed is in its file, and so a line is of
# whole windows, never of a step inside one.


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


STORED_RESULTS_NOTE = "nfold: stored measurements are used again; next: --again, to repeat them"
PRELIMINARY_RESAMPLES = 60
"""Bootstrap resamples of a preliminary result: intervals are rough, and it takes a moment."""
PRELIMINARY_TIME_FRACTION = 0.03
"""Of the time budget: preliminary results are skipped while they would take more."""


class ExplainProgress(ExperimentEvents):
    """What is known so far, what is measured now, and the time left.

    A terminal shows it live. Elsewhere a line is printed when the conclusion changes.
    """

    def __init__(self, screen: PlainScreen, target: str) -> None:
        self._screen, self._target = screen, target
        self._design: ExperimentDesign | None = None
        self._results = TrialResults()
        self._known = f"{target}: inspecting the script"
        self._not_before = 0.0
        self._running = self._reuse_printed = False

    def planned(self, design: ExperimentDesign, results: TrialResults) -> None:
        self._design, self._results = design, results
        self._known = "no result yet: one device and all devices are measured first"

    def started(self, trials: Sequence[Trial], number: int, remaining_s: float) -> None:
        self._running = True
        more = f" and {len(trials) - 1} more" if len(trials) > 1 else ""
        now = (
            "inspecting"
            if trials[0].plan.batch is None
            else f"measuring {self._name(trials[0])}{more}"
        )
        self._screen.show_live(
            terminal_safe(f"So far: {self._known}"),
            terminal_safe(f"{format_short_duration(remaining_s)} left · {now}"),
        )

    def finished(
        self, trials: Sequence[Trial], number: int, found: Sequence[Measurement], remaining_s: float
    ) -> None:
        if not (self._running or self._reuse_printed):
            self._reuse_printed = True
            self._screen.print_line(STORED_RESULTS_NOTE)
        self._running = False
        if trials[0].plan.batch is None:
            return  # the error message of a failed probe run follows
        for failed in [one for one in found if one.status not in ("ok", "interrupted")][:1]:
            text = failed.cause.text if failed.cause else "no error message"
            self._screen.print_line(
                terminal_safe(f"{self._name(trials[0])}: {failed.status}: {text}")
            )

    def updated(self, remaining_s: float) -> None:
        """Show the preliminary conclusion after new results."""
        started = time.monotonic()
        if started < self._not_before:
            return
        known = self._preliminary()
        ended = time.monotonic()
        self._not_before = ended + (ended - started) / PRELIMINARY_TIME_FRACTION
        if known and known != self._known:
            self._known = known
            line = terminal_safe(f"{format_short_duration(remaining_s)} left · so far: {known}")
            self._screen.show_live(line)
            self._screen.print_progress(line)

    def _name(self, trial: Trial) -> str:
        return name_trial(trial, self._design.plan if self._design else None)

    def _preliminary(self) -> str:
        design = self._design
        if design is None or not self._results.has([design.actual(), design.baseline]):
            return ""
        budget = build_budget(self._target, design, self._results, resamples=PRELIMINARY_RESAMPLES)
        view = build_view(budget)
        gain = f" {view.change.code}: {view.gain}." if view.change and view.gain else ""
        return f"{view.headline}{gain}"
