"""Running a grid: what is in the store is skipped, what is run is in the store before the next."""

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
    """One run of one cell; repeats count from 0."""

    cell: GridCell
    repeat: int = 0


@dataclass(frozen=True, kw_only=True)
class SweepSchedule:
    """What is still to run, in order, and what earlier runs have measured, in the grid's order."""

    pending: tuple[CellRun, ...]
    done: tuple[tuple[CellRun, Measurement], ...]


class RunCell(Protocol):
    """The one verb, ``nfold.launch.workload_run.run``."""

    def __call__(
        self,
        workload: Workload,
        plan: Plan,
        *,
        machine: Machine,
        options: RunOptions,
        repeat: int,
    ) -> Measurement:
        """Run one complete plan; a failure is a measurement too."""


class SweepEvents:
    """What a sweep tells while it goes on. This base listens to nothing."""

    def skipped(self, turn: CellRun, measurement: Measurement) -> None:
        """An earlier run has measured this."""

    def cell_started(self, turn: CellRun) -> None:
        """A run begins."""

    def progress(self, progress: RunProgress) -> None:
        """The run that began last is at this point."""

    def cell_finished(self, turn: CellRun, measurement: Measurement) -> None:
        """A run has ended, well or not, and is in the store."""


def schedule_sweep(
    grid: Grid, store: MeasurementStore, *, repeats: int = 1, again: bool = False, seed: int = 0
) -> SweepSchedule:
    """The turns of ``repeats`` rounds over the grid, each in a random order of its own.

    In round i every cell has its turn once, so that a slow drift of the machine meets all of
    them alike. A cell that cannot run has one turn. ``again`` runs also what is in the store.
    """
    todo: list[CellRun] = []
    done: list[tuple[CellRun, Measurement]] = []
    for repeat in range(repeats):
        turns = [
            CellRun(cell=cell, repeat=repeat)
            for cell in grid.cells
            if repeat == 0 or cell.unsupported_reason is None
        ]
        stored = [(turn, None if again else _finished(turn, store)) for turn in turns]
        done += [(turn, found) for turn, found in stored if found is not None]
        open_turns = [turn for turn, found in stored if found is None]
        random.Random(f"{seed}-{repeat}").shuffle(open_turns)
        todo += open_turns
    return SweepSchedule(pending=tuple(todo), done=tuple(done))


def _finished(cell_run: CellRun, store: MeasurementStore) -> Measurement | None:
    found = store.find(cell_run.cell.id, cell_run.repeat)
    if found is None or not found.is_final:
        return None
    possible_by_now = found.status == "unsupported" and cell_run.cell.unsupported_reason is None
    return None if possible_by_now else found


def run_sweep(
    planned: SweepSchedule,
    *,
    store: MeasurementStore,
    machine: Machine,
    options: RunOptions,
    run: RunCell,
    events: SweepEvents,
) -> list[Measurement]:
    """Run what is still to run; returns all measurements of the grid, the stored ones included.

    Ends early where ``options.stop`` is set; what was running is then ``interrupted``.
    """
    watched = dataclasses.replace(options, on_progress=events.progress)
    found = [measurement for _, measurement in planned.done]
    for turn, measurement in planned.done:
        events.skipped(turn, measurement)
    for turn in planned.pending:
        if options.stop:
            break
        events.cell_started(turn)
        measurement = _measure(turn, machine, watched, run)
        store.append(measurement)
        found.append(measurement)
        events.cell_finished(turn, measurement)
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
    """The measurements as the grid lists its cells, repeats in their order."""
    place = {cell.id: number for number, cell in enumerate(grid.cells)}
    return sorted(measurements, key=lambda m: (place[m.cell], m.repeat))
