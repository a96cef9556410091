"""What ``nfold bench`` does once its options are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfold import data
from nfold.bench.axes import read_axes
from nfold.bench.estimate import estimate
from nfold.bench.grid import Grid, build_grid
from nfold.bench.sweep import Events, Records, Schedule, in_grid_order, schedule, sweep
from nfold.cli import output
from nfold.cli.progress import LiveEvents, PlainEvents, TimeLeft
from nfold.cli.signals import stop_on_signals
from nfold.document import document
from nfold.frameworks.registry import framework
from nfold.machine import Machine
from nfold.measurement import Measurement
from nfold.plan import Plan
from nfold.run import attach
from nfold.run.options import Options
from nfold.run.run import run
from nfold.store.store import Store
from nfold.telemetry.inspection import inspect_machine
from nfold.workload import Workload
from nfold.workloads import info, parameters

FAILED = ("crashed", "hung", "killed", "diverged")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of ``nfold bench`` as they were given."""

    workload: str
    lists: Mapping[str, str | None]
    device: str | None
    devices: str | None
    parameters: tuple[str, ...]
    scaling: str
    fixed: Mapping[str, Any]
    repeats: int
    again: bool
    results: Path
    data: Path | None
    telemetry_interval_s: float
    hang_timeout_s: float
    in_process: bool
    as_json: bool
    plain: bool
    report: bool


class Follower(Records):
    """The store of a rank other than 0 in an attached job: rank 0 writes, the others do not."""

    def find(self, cell: str, repeat: int) -> Measurement | None:
        """What the leader's store has."""
        del cell, repeat
        return None

    def append(self, measurement: Measurement) -> None:
        """Leave it to rank 0."""


def bench(request: Request, *, dry_run: bool) -> int:
    """Measure the grid, print, report; the exit code."""
    machine = inspect_machine()
    workload = Workload.parse(request.workload)
    parameters(workload)
    asked = _grid(request, machine)
    if attach.attached() and attach.rank() != 0:
        return _follow(request, asked, machine)
    with Store.open(request.results) as store:
        again = request.again or attach.attached()
        todo = schedule(asked, store, repeats=request.repeats, again=again)
        earlier = [m for m in store.measurements() if m.machine.id == machine.id]
        expected = [estimate(turn.cell, earlier) for turn in todo.todo]
        if dry_run:
            output.print_plan(asked, todo, expected)
            return 0
        _prepare(request, workload)
        with stop_on_signals() as stop:
            options = _options(request, stop=stop)
            with _events(request, todo, sum(part.seconds for part in expected)) as events:
                measured = sweep(
                    todo,
                    store=store,
                    machine=machine,
                    options=options,
                    run=run,
                    events=events,
                )
        found = in_grid_order(asked, measured)
        _show(request, asked, todo, found)
        return 128 + stop.signum if stop.signum is not None else _exit_code(found)


def _grid(request: Request, machine: Machine) -> Grid:
    common = Plan(device=request.device, **request.fixed)
    axes = read_axes(
        request.workload,
        {"devices": request.devices, **request.lists},
        common=common,
        parameters=request.parameters,
        scaling=request.scaling,
    )

    def unsupported(workload: Workload, plan: Plan, host: Machine) -> str | None:
        return framework(plan.framework).unsupported(workload, plan, host)

    return build_grid(axes, machine, unsupported)


def _prepare(request: Request, workload: Workload) -> None:
    """Find the data once, before anything runs: missing data is one error, not a failed sweep."""
    dataset = info(workload.name).dataset
    if dataset is not None:
        data.prepare(dataset, request.data)


def _options(request: Request, **changes: Any) -> Options:
    return Options(
        results=request.results,
        telemetry_interval_s=request.telemetry_interval_s,
        hang_timeout_s=request.hang_timeout_s,
        in_process=request.in_process,
        **changes,
    )


def _follow(request: Request, asked: Grid, machine: Machine) -> int:
    """A further rank of an attached job: the same runs in the same order, without a word."""
    store = Follower()
    todo = schedule(asked, store, repeats=request.repeats, again=True)
    _prepare(request, Workload.parse(request.workload))
    done = sweep(
        todo,
        store=store,
        machine=machine,
        options=_options(request),
        run=run,
        events=Events(),
    )
    return _exit_code(done)


def _events(request: Request, todo: Schedule, expected_s: float) -> PlainEvents:
    left = TimeLeft(expected_s, len(todo.todo))
    if sys.stderr.isatty() and not request.plain:
        return LiveEvents(sys.stderr, left, len(todo.todo))
    return PlainEvents(sys.stderr, left, len(todo.todo))


def _exit_code(found: Sequence[Measurement]) -> int:
    return 1 if any(measurement.status in FAILED for measurement in found) else 0


def _show(request: Request, asked: Grid, todo: Schedule, found: Sequence[Measurement]) -> None:
    if request.as_json:
        output.print_json(json.dumps(document(found)))
        return
    output.print_scope(asked, todo)
    if not found:
        return
    output.print_table(found)
    if request.report:
        output.write_report(request.results)
