"""Run a grid: stored cells are skipped, and each run is stored before the next one starts."""

from __future__ import annotations

import dataclasses
import datetime
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nfold.bench.grid import Grid, GridCell
from nfold.core.machine import Machine
from nfold.core.measurement import FailureCause, Measurement, MeasurementStore
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.launch.launch_spec import RunOptions, RunProgress


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """One run of one cell. ``repeat`` counts from 0."""

    cell: GridCell
    repeat: int = 0


@dataclass(frozen=True, kw_only=True)
class SweepSchedule:
    """The runs still to do, in order, and the stored ones, in the order of the grid."""

    pending: tuple[CellRun, ...]
    done: tuple[tuple[CellRun, Measurement], ...]


class RunCell(Protocol):
    """The type of ``nfold.launch.workload_run.run``."""

    def __call__(
        self, workload: Workload, plan: Plan, *, machine: Machine, options: RunOptions, repeat: int
    ) -> Measurement:
        """Run one complete plan; a failure is a measurement too."""


class SweepEvents:
    """Callbacks of a sweep. The base class does nothing."""

    def skipped(self, cell_run: CellRun, measurement: Measurement) -> None:
        """Called for a stored run."""

    def cell_started(self, cell_run: CellRun) -> None:
        """Called when a run starts."""

    def progress(self, progress: RunProgress) -> None:
        """Called with the progress of the current run."""

    def cell_finished(self, cell_run: CellRun, measurement: Measurement) -> None:
        """Called when a run, successful or not, is stored."""


def schedule_sweep(
    grid: Grid, store: MeasurementStore, *, repeats: int = 1, again: bool = False, seed: int = 0
) -> SweepSchedule:
    """Schedule ``repeats`` rounds over the grid, each in its own random order.

    Every cell runs once per round, so that drift of the machine affects all cells alike. An
    unsupported cell is scheduled once. ``again`` also runs what is stored.
    """
    pending: list[CellRun] = []
    done: list[tuple[CellRun, Measurement]] = []
    for repeat in range(repeats):
        runs = [
            CellRun(cell=cell, repeat=repeat)
            for cell in grid.cells
            if repeat == 0 or cell.unsupported_reason is None
        ]
        stored = [(run, None if again else _finished(run, store)) for run in runs]
        done += [(run, found) for run, found in stored if found is not None]
        missing = [run for run, found in stored if found is None]
        random.Random(f"{seed}-{repeat}").shuffle(missing)
        pending += missing
    return SweepSchedule(pending=tuple(pending), done=tuple(done))


def _finished(cell_run: CellRun, store: MeasurementStore) -> Measurement | None:
    found = store.find(cell_run.cell.id, cell_run.repeat)
    if found is None or not found.is_final:
        return None
    supported_now = found.status == "unsupported" and cell_run.cell.unsupported_reason is None
    return None if supported_now else found


def run_sweep(
    schedule: SweepSchedule,
    *,
    store: MeasurementStore,
    machine: Machine,
    options: RunOptions,
    run: RunCell,
    events: SweepEvents,
) -> list[Measurement]:
    """Run the schedule; return all measurements of the grid, the stored ones first.

    Ends early if ``options.stop`` is set; the current run is then ``interrupted``.
    """
    options = dataclasses.replace(options, on_progress=events.progress)
    found = [measurement for _, measurement in schedule.done]
    for cell_run, measurement in schedule.done:
        events.skipped(cell_run, measurement)
    for cell_run in schedule.pending:
        if options.stop:
            break
        events.cell_started(cell_run)
        measurement = _measure(cell_run, machine, options, run)
        store.append(measurement)
        found.append(measurement)
        events.cell_finished(cell_run, measurement)
    return found


def _measure(cell_run: CellRun, machine: Machine, options: RunOptions, run: RunCell) -> Measurement:
    cell = cell_run.cell
    if cell.unsupported_reason is not None:
        return _unsupported(cell_run, machine, cell.unsupported_reason)
    return run(cell.workload, cell.plan, machine=machine, options=options, repeat=cell_run.repeat)


def _unsupported(cell_run: CellRun, machine: Machine, reason: str) -> Measurement:
    return Measurement(
        id=f"{cell_run.cell.id}-{cell_run.repeat}-{secrets.token_hex(3)}",
        workload=cell_run.cell.workload,
        plan=cell_run.cell.plan,
        machine=machine,
        status="unsupported",
        repeat=cell_run.repeat,
        cause=FailureCause(text=reason),
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def sort_by_grid(grid: Grid, measurements: Sequence[Measurement]) -> list[Measurement]:
    """Sort measurements in the order of the cells, then of the repeats."""
    position = {cell.id: number for number, cell in enumerate(grid.cells)}
    return sorted(measurements, key=lambda m: (position[m.cell], m.repeat))
