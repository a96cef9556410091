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
from nfold.machine import Machine
from nfold.measurement import Cause, Measurement
from nfold.plan import Plan
from nfold.records import Records
from nfold.run.options import Options, Progress
from nfold.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One run of one cell; repeats count from 0."""

    cell: GridCell
    repeat: int = 0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What is still to run, in order, and what earlier runs have measured, in the grid's order."""

    todo: tuple[Turn, ...]
    done: tuple[tuple[Turn, Measurement], ...]


class Run(Protocol):
    """The one verb, ``nfold.run.run.run``."""

    def __call__(
        self,
        workload: Workload,
        plan: Plan,
        *,
        machine: Machine,
        options: Options,
        repeat: int,
    ) -> Measurement:
        """Run one complete plan; a failure is a measurement too."""


class Events:
    """What a sweep tells while it goes on. This base listens to nothing."""

    def skipped(self, turn: Turn, measurement: Measurement) -> None:
        """An earlier run has measured this."""

    def cell_started(self, turn: Turn) -> None:
        """A run begins."""

    def progress(self, progress: Progress) -> None:
        """The run that began last is at this point."""

    def cell_finished(self, turn: Turn, measurement: Measurement) -> None:
        """A run has ended, well or not, and is in the store."""


def schedule(
    grid: Grid, store: Records, *, repeats: int = 1, again: bool = False, seed: int = 0
) -> Schedule:
    """The turns of ``repeats`` rounds over the grid, each in a random order of its own.

    In round i every cell has its turn once, so that a slow drift of the machine meets all of
    them alike. A cell that cannot run has one turn. ``again`` runs also what is in the store.
    """
    todo: list[Turn] = []
    done: list[tuple[Turn, Measurement]] = []
    for repeat in range(repeats):
        turns = [
            Turn(cell=cell, repeat=repeat)
            for cell in grid.cells
            if repeat == 0 or cell.reason is None
        ]
        stored = [(turn, None if again else _finished(turn, store)) for turn in turns]
        done += [(turn, found) for turn, found in stored if found is not None]
        open_turns = [turn for turn, found in stored if found is None]
        random.Random(f"{seed}-{repeat}").shuffle(open_turns)
        todo += open_turns
    return Schedule(todo=tuple(todo), done=tuple(done))


def _finished(turn: Turn, store: Records) -> Measurement | None:
    """The stored result, unless it must be run again: cut short, or possible by now."""
    found = store.find(turn.cell.id, turn.repeat)
    if found is None or not found.finished:
        return None
    possible_by_now = found.status == "unsupported" and turn.cell.reason is None
    return None if possible_by_now else found


def sweep(
    planned: Schedule,
    *,
    store: Records,
    machine: Machine,
    options: Options,
    run: Run,
    events: Events,
) -> list[Measurement]:
    """Run what is still to run; returns all measurements of the grid, the stored ones included.

    Ends early where ``options.stop`` is set; what was running is then ``interrupted``.
    """
    watched = dataclasses.replace(options, watch=events.progress)
    found = [measurement for _, measurement in planned.done]
    for turn, measurement in planned.done:
        events.skipped(turn, measurement)
    for turn in planned.todo:
        if options.stop:
            break
        events.cell_started(turn)
        measurement = _measure(turn, machine, watched, run)
        store.append(measurement)
        found.append(measurement)
        events.cell_finished(turn, measurement)
    return found


def _measure(turn: Turn, machine: Machine, options: Options, run: Run) -> Measurement:
    cell = turn.cell
    if cell.reason is not None:
        return _unsupported(turn, machine, cell.reason)
    return run(cell.workload, cell.plan, machine=machine, options=options, repeat=turn.repeat)


def _unsupported(turn: Turn, machine: Machine, reason: str) -> Measurement:
    """A row for a combination that cannot run: said, never left out."""
    return Measurement(
        id=f"{turn.cell.id}-{turn.repeat}-{secrets.token_hex(3)}",
        workload=turn.cell.workload,
        plan=turn.cell.plan,
        machine=machine,
        status="unsupported",
        repeat=turn.repeat,
        cause=Cause(text=reason),
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def in_grid_order(grid: Grid, measurements: Sequence[Measurement]) -> list[Measurement]:
    """The measurements as the grid lists its cells, repeats in their order."""
    place = {cell.id: number for number, cell in enumerate(grid.cells)}
    return sorted(measurements, key=lambda m: (place[m.cell], m.repeat))
