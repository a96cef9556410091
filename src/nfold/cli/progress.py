"""What a person sees while a sweep runs: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from nfold.bench.sweep import CellRun, SweepEvents
from nfold.cli.screen import PlainScreen
from nfold.inert import terminal_safe
from nfold.measurement import Measurement
from nfold.run.options import RunProgress
from nfold.summary import Cell, samples_per_s


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
        """Show the new cell."""
        self._cell_run = turn
        self._number += 1
        self.progress(RunProgress(phase="starting", step=0, total=0))

    def progress(self, progress: RunProgress) -> None:
        """Draw the live lines anew."""
        assert self._cell_run is not None
        left = format_short_duration(self._left.estimate_s())
        head = f"{self._number}/{self._total} cells · {left} left · {describe_cell(self._cell_run)}"
        self._screen.show_live(head, f"  {describe_progress(progress)}")

    def cell_finished(self, turn: CellRun, measurement: Measurement) -> None:
        """Print the line."""
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
