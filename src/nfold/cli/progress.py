"""Progress of runs: live lines on a terminal, plain lines elsewhere."""

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
from nfold.explain.attribution import build_budget
from nfold.explain.design import ExperimentDesign, Trial, name_trial
from nfold.explain.experiment import ExperimentEvents
from nfold.explain.planner import waits_mostly_for_input
from nfold.explain.result.view import build_view, describe_input_wait
from nfold.explain.trials import TrialResults
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import RunProgress


def format_short_duration(duration_s: float) -> str:
    """Format seconds as ``8 s``, ``2:05`` or ``1:02:05``."""
    whole = round(duration_s)
    if whole < 60:
        return f"{whole} s"
    minutes, seconds = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def describe_cell(cell_run: CellRun) -> str:
    """Return ``cnn10 · 2 cuda devices · ddp · batch 512``."""
    workload, label = str(cell_run.cell.workload), cell_run.cell.label
    name = workload if label == workload else f"{workload} · {label}"
    return terminal_safe(f"{name} · repeat {cell_run.repeat + 1}" if cell_run.repeat else name)


def describe_measurement(measurement: Measurement) -> str:
    """Return the throughput, or the status with its cause."""
    rate = samples_per_s(Cell(measurements=(measurement,)))
    if measurement.status == "ok" and rate is not None:
        return f"{rate.value:,.0f} images/s"
    cause = f": {measurement.cause.text}" if measurement.cause else ""
    return terminal_safe(f"{measurement.status}{cause}")


class RemainingTime:
    """Estimates the remaining time of a sweep, corrected by the time of finished runs.

    ``estimates_s`` has one entry per run, in their order. ``clock`` is monotonic.
    """

    def __init__(
        self, estimates_s: Sequence[float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._estimates_s, self._clock = estimates_s, clock
        self._began = self._ended = clock()
        self._finished = 0
        self.total_runs = len(estimates_s)

    def record_finished(self) -> None:
        self._finished += 1
        self._ended = self._clock()

    def estimate_s(self) -> float:
        """Return the remaining seconds, of the current run and the runs after it."""
        before = sum(self._estimates_s[: self._finished])
        after = sum(self._estimates_s[self._finished :])
        correction = (self._ended - self._began) / before if before else 1.0
        return max(0.0, correction * after - (self._clock() - self._ended))


class SweepProgress(SweepEvents):
    """Prints a line per finished cell, and live lines with the time left and the current step."""

    def __init__(self, screen: PlainScreen, remaining: RemainingTime) -> None:
        self._screen, self._remaining = screen, remaining
        self._number = 0
        self._cell_run: CellRun | None = None

    def cell_started(self, cell_run: CellRun) -> None:
        self._cell_run = cell_run
        self._number += 1
        self.progress(RunProgress(phase="starting", step=0, total=0))

    def progress(self, progress: RunProgress) -> None:
        assert self._cell_run is not None
        left = f"{format_short_duration(self._remaining.estimate_s())} left"
        cells = f"{self._number}/{self._remaining.total_runs} cells"
        self._screen.show_live(
            f"{cells} · {left} · {describe_cell(self._cell_run)}",
            f"  {describe_progress(progress)}",
        )

    def cell_finished(self, cell_run: CellRun, measurement: Measurement) -> None:
        self._remaining.record_finished()
        number, total = self._number, self._remaining.total_runs
        left = f", {format_short_duration(self._remaining.estimate_s())} left"
        time_taken = format_short_duration(measurement.wall_seconds)
        self._screen.print_line(
            f"[{number}/{total}] {describe_cell(cell_run)}: {describe_measurement(measurement)} "
            f"({time_taken}{left if number < total else ''})"
        )


def describe_progress(progress: RunProgress) -> str:
    """Return ``stepping · step 120/500 · 41,200 images/s · device load 97 %``."""
    words = [progress.phase]
    if progress.step:
        words.append(f"step {progress.step}" + (f"/{progress.total}" if progress.total else ""))
    if progress.samples_per_s is not None:
        words.append(f"{progress.samples_per_s:,.0f} images/s")
    if progress.device_load is not None:
        words.append(f"device load {progress.device_load:.0f} %")
    return " · ".join(words)


def format_epoch(number: int, total: int, epoch: Epoch) -> str:
    """Return ``epoch 3/10: loss 0.512, accuracy 0.8421, 3.2 s``."""
    accuracy = "" if epoch.accuracy is None else f", accuracy {epoch.accuracy:.4f}"
    loss = "" if epoch.train_loss is None else f" loss {epoch.train_loss:.3f}"
    return f"epoch {number}/{total}:{loss}{accuracy}, {epoch.seconds:.1f} s"


class StepTimer:
    """Estimates the time of the remaining steps from the steps so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def remaining_s(self, progress: RunProgress) -> float | None:
        """Return the seconds until the last step, or None before the second step."""
        if not progress.step:
            return None
        self._first = self._first or (self._clock(), progress.step)
        began, step = self._first
        if progress.step == step:
            return None
        each = (self._clock() - began) / (progress.step - step)
        return each * max(0, progress.total - progress.step)


class FolderReader:
    """Reads the samples of a run from its folder, so that no rank is interrupted."""

    def __init__(self) -> None:
        self._folder: HandoffFolder | None = None
        self._changed_ns = 0

    def started(self, folder: Path) -> None:
        self._folder = HandoffFolder(folder)

    def changed_folder(self) -> HandoffFolder | None:
        """Return the folder if its samples have changed since the last call."""
        changed_ns = 0 if self._folder is None else self._folder.reports.samples_mtime_ns()
        if changed_ns == self._changed_ns:
            return None
        self._changed_ns = changed_ns
        return self._folder


class EpochProgress(FolderReader):
    """Prints a line per finished epoch, and a live line with step, throughput and time left.

    ``total`` counts all epochs, ``before`` the epochs of an earlier run.
    """

    def __init__(self, screen: PlainScreen, total: int, before: int = 0) -> None:
        super().__init__()
        self._screen, self._total, self._printed_epochs = screen, total, before
        self._step_timer = StepTimer()

    def progress(self, progress: RunProgress) -> None:
        """Print newly finished epochs and update the live line."""
        if folder := self.changed_folder():
            self.finished(folder.reports.read_epochs())
        words = [
            f"epoch {min(self._printed_epochs + 1, self._total)}/{self._total}",
            describe_progress(progress),
        ]
        left_s = self._step_timer.remaining_s(progress)
        if left_s is not None:
            words.append(f"{format_short_duration(left_s)} left")
        self._screen.show_live(" · ".join(words))

    def finished(self, epochs: Sequence[Epoch]) -> None:
        """Print the epochs that are not printed yet."""
        for number, epoch in enumerate(epochs, start=1):
            if number > self._printed_epochs:
                self._screen.print_line(format_epoch(number, self._total, epoch))
                self._printed_epochs = number


@dataclass(frozen=True)
class CompletedWindow:
    """A timed window of all ranks: its last step, number of steps, samples, seconds, mean loss."""

    step: int
    steps: int
    samples: int
    seconds: float
    loss: float


def completed_windows(ranks: Sequence[RankSamples]) -> list[CompletedWindow]:
    """Return the windows that every rank has finished: time of the slowest rank, loss of rank 0."""
    if not ranks or not all(rank.windows for rank in ranks):
        return []
    # The warm-up has losses but no windows.
    losses = ranks[0].losses[-len(ranks[0].windows) :]
    windows = zip(*(rank.windows for rank in ranks), strict=False)
    return [
        CompletedWindow(
            step=step,
            steps=rank_windows[0].steps,
            samples=sum(window.samples for window in rank_windows),
            seconds=max(window.seconds for window in rank_windows),
            loss=loss,
        )
        for (step, loss), rank_windows in zip(losses, windows, strict=False)
    ]


def format_steps(windows: Sequence[CompletedWindow]) -> str:
    """Return ``step 200, loss 0.512, 4,120 images/s, 0.0311 s/batch`` over several windows."""
    steps = sum(window.steps for window in windows)
    seconds = sum(window.seconds for window in windows)
    loss = sum(window.loss * window.steps for window in windows) / steps
    rate = sum(window.samples for window in windows) / seconds
    return (
        f"step {windows[-1].step}, loss {loss:.4g}, {rate:,.1f} images/s, "
        f"{seconds / steps:.3g} s/batch"
    )


class StepProgress(FolderReader):
    """Prints a line per ``every`` steps, at the end of a timed window; 0: none."""

    def __init__(self, screen: PlainScreen, every: int) -> None:
        super().__init__()
        self._screen, self._every, self._printed = screen, every, 0

    def progress(self, progress: RunProgress) -> None:
        """Print the lines that are complete since the last call."""
        del progress
        if self._every and (folder := self.changed_folder()):
            self._print_completed(folder.reports.read_samples())

    def _print_completed(self, ranks: Sequence[RankSamples]) -> None:
        windows = completed_windows(ranks)
        end = self._printed
        for number in range(self._printed + 1, len(windows) + 1):
            if sum(window.steps for window in windows[end:number]) >= self._every:
                self._screen.print_line(format_steps(windows[end:number]))
                end = number
        self._printed = end

    def finished(self, ranks: Sequence[RankSamples]) -> None:
        """Print the remaining windows, also if they have fewer steps than ``every``."""
        if self._every:
            self._print_completed(ranks)
            remaining = completed_windows(ranks)[self._printed :]
            if remaining:
                self._screen.print_line(format_steps(remaining))


STORED_RESULTS_NOTE = "nfold: stored measurements are used again; next: --again, to repeat them"
PRELIMINARY_RESAMPLES = 60  # bootstrap resamples: rough intervals in a moment
PRELIMINARY_TIME_FRACTION = 0.03  # of the time budget


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
        if self._design is not None and not self._results.runs:
            self._conclude(self._seen_in_probe(self._design), remaining_s)
        more = f" and {len(trials) - 1} more" if len(trials) > 1 else ""
        inspects = trials[0].plan.batch is None
        now = "inspecting" if inspects else f"measuring {self._name(trials[0])}{more}"
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
            line = f"{self._name(trials[0])}: {failed.status}: {text}"
            self._screen.print_line(terminal_safe(line))

    def updated(self, remaining_s: float) -> None:
        """Show the preliminary conclusion after new results."""
        started = time.monotonic()
        if started < self._not_before:
            return
        known = self._preliminary()
        ended = time.monotonic()
        self._not_before = ended + (ended - started) / PRELIMINARY_TIME_FRACTION
        self._conclude(known, remaining_s)

    def _conclude(self, known: str, remaining_s: float) -> None:
        if known and known != self._known:
            self._known = known
            line = terminal_safe(f"{format_short_duration(remaining_s)} left · so far: {known}")
            self._screen.show_live(line)
            self._screen.print_progress(line)

    def _name(self, trial: Trial) -> str:
        return name_trial(trial, self._design.plan if self._design else None)

    def _seen_in_probe(self, design: ExperimentDesign) -> str:
        if design.step_ms is None or not waits_mostly_for_input(design):
            return ""
        facts = design.facts
        return describe_input_wait(facts.input_wait_ms, design.step_ms, facts.world_size)

    def _preliminary(self) -> str:
        design = self._design
        if design is None or not self._results.has([design.actual(), design.baseline]):
            return ""
        budget = build_budget(self._target, design, self._results, resamples=PRELIMINARY_RESAMPLES)
        view = build_view(budget)
        gain = f" {view.change.code}: {view.gain}." if view.change and view.gain else ""
        return f"{view.headline}{gain}"
