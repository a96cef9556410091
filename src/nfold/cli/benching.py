"""What ``nfold bench`` does once its options are read."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from nfold.bench.axes import Axes, read_axes
from nfold.bench.estimate import Estimate, estimate
from nfold.bench.grid import Grid, build_grids
from nfold.bench.report_axes import NARROWED, Chosen, axes_of, places
from nfold.bench.reports import report
from nfold.bench.sweep import Events, Schedule, in_grid_order, schedule, sweep
from nfold.cli import output
from nfold.cli.flags import Flags
from nfold.cli.preparing import completing, epoch_samples, prepare
from nfold.cli.progress import CellLines, TimeLeft
from nfold.cli.screen import screen
from nfold.cli.signals import stop_on_signals
from nfold.document import document
from nfold.errors import UsageError
from nfold.frameworks.registry import framework
from nfold.machine import Machine
from nfold.measurement import Measurement
from nfold.plan import Plan
from nfold.records import Records
from nfold.run import attach
from nfold.run.run import run
from nfold.run.spare import Spare
from nfold.store.store import Store
from nfold.telemetry.inspection import inspect_machine
from nfold.workload import Workload

FAILED = ("crashed", "hung", "killed", "diverged")


@dataclass(frozen=True, kw_only=True)
class Request(Flags):
    """The options of ``nfold bench`` as they were given, by the names of its parameters."""

    workload: str | None
    report: str | None
    quick: bool
    parameter: Sequence[str] | None
    scaling: str
    steps: int | None
    epochs: int | None
    warmup_steps: int | None
    repeat: int | None
    dry_run: bool
    in_process: bool
    no_report: bool

    def __post_init__(self) -> None:
        if (self.workload is None) == (self.report is None):
            told = "neither" if self.workload is None else "both"
            raise UsageError(
                f"{told} of WORKLOAD and --report NAME: give one of them; next: nfold bench "
                "digits, or nfold bench --report conv2d-devices --quick"
            )
        if self.quick and self.report is None:
            raise UsageError("--quick is of a field report; next: --report NAME --quick")
        super().__post_init__()

    @property
    def common(self) -> Plan:
        """What holds in every cell."""
        return Plan(
            **self.switches,
            steps=self.steps,
            epochs=self.epochs,
            warmup_steps=self.warmup_steps,
        )

    @property
    def repeats(self) -> int:
        """Runs of every cell."""
        return self.repeat or (report(self.report).repeats if self.report else 1)


class Follower(Records):
    """The store of a rank other than 0 in an attached job: rank 0 writes, the others do not."""

    def find(self, cell: str, repeat: int) -> Measurement | None:
        """What the leader's store has."""
        del cell, repeat
        return None

    def append(self, measurement: Measurement) -> None:
        """Leave it to rank 0."""


def bench(request: Request) -> int:
    """Measure the grid, print, report; the exit code."""
    machine = inspect_machine()
    asked = _grid(request, machine)
    if attach.attached() and attach.rank() != 0:
        return _follow(request, asked, machine)
    with Store.open(request.results) as store:
        again = request.again or attach.attached()
        planned = schedule(asked, store, repeats=request.repeats, again=again)
        earlier = [m for m in store.measurements() if m.machine.id == machine.id]
        if request.dry_run:
            expected = [estimate(turn.cell, earlier) for turn in planned.todo]
            output.print_plan(asked, planned, expected, as_json=request.as_json)
            return 0
        _prepare(request, asked)
        prepared = functools.cache(epoch_samples)
        expected = [estimate(turn.cell, earlier, prepared) for turn in planned.todo]
        return _measure(request, asked, planned, expected, store, machine)


def _measure(
    request: Request,
    asked: Grid,
    planned: Schedule,
    expected: Sequence[Estimate],
    store: Store,
    machine: Machine,
) -> int:
    """Sweep, and print what there is, also after a request to stop."""
    with stop_on_signals() as stop, closing(Spare()) as spare:
        left = TimeLeft([part.seconds for part in expected])
        with screen(sys.stderr, plain=request.plain) as shown:
            measured = sweep(
                planned,
                store=store,
                machine=machine,
                options=request.options(in_process=request.in_process, stop=stop, spare=spare),
                run=run,
                events=CellLines(shown, left),
            )
        found = in_grid_order(asked, measured)
        _show(request, asked, planned, found)
    return 128 + stop.signum if stop.signum is not None else _exit_code(found)


def _grid(request: Request, machine: Machine) -> Grid:
    complete = completing(machine, request.data, measures=not request.dry_run)
    return build_grids(_axes(request, machine), machine, _unsupported, complete)


def _axes(request: Request, machine: Machine) -> list[Axes]:
    if request.report is not None:
        return report_axes(request, machine)
    axes = read_axes(
        str(request.workload),
        request.fields,
        common=request.common,
        parameters=tuple(request.parameter or ()),
        scaling=request.scaling,
    )
    return [axes]


def report_axes(request: Request, machine: Machine) -> list[Axes]:
    """The grids of a field report on this machine, narrowed as asked; UsageError for the rest."""
    asked = report(str(request.report))
    said = {name: text for name, text in request.fields.items() if text is not None}
    devices = said.pop("devices", None)
    refused = [name for name in said if name not in NARROWED]
    refused += [name for name in ("parameter", "warmup_steps") if getattr(request, name)]
    refused += ["scaling"] if request.scaling != "strong" else []
    if refused:
        option = refused[0].replace("_", "-")
        raise UsageError(
            f"--{option} does not go with --report: the grid of {asked.name} is fixed; next: leave "
            "it out, or measure a grid of your own with nfold bench WORKLOAD"
        )
    chosen = Chosen(
        devices=devices or places(machine, request.device),
        device=request.device,
        steps=request.steps,
        epochs=request.epochs,
        kept=said,
    )
    return axes_of(asked.parts(quick=request.quick), chosen)


def _unsupported(workload: Workload, plan: Plan, machine: Machine) -> str | None:
    return framework(plan.framework).unsupported(workload, plan, machine)


def _prepare(request: Request, asked: Grid) -> None:
    """Find the data once, before anything runs: missing data is one error, not a failed sweep.

    Cells that do not run, and the simulated framework, read none.
    """
    reading = [c for c in asked.cells if c.reason is None and not _in_parent(c.plan)]
    kept = {(c.workload, c.plan.cache, c.plan.input, c.plan.bad_images): c for c in reading}
    for cell in kept.values():
        prepare(cell.workload, cell.plan, request.data)


def _in_parent(plan: Plan) -> bool:
    return framework(plan.framework).in_parent


def _follow(request: Request, asked: Grid, machine: Machine) -> int:
    """A further rank of an attached job: the same runs in the same order, without a word."""
    if request.dry_run:
        return 0
    store = Follower()
    planned = schedule(asked, store, repeats=request.repeats, again=True)
    _prepare(request, asked)
    with stop_on_signals() as stop:
        done = sweep(
            planned,
            store=store,
            machine=machine,
            options=request.options(in_process=request.in_process, stop=stop),
            run=run,
            events=Events(),
        )
    return 128 + stop.signum if stop.signum is not None else _exit_code(done)


def _exit_code(found: Sequence[Measurement]) -> int:
    return 1 if any(measurement.status in FAILED for measurement in found) else 0


def _show(request: Request, asked: Grid, planned: Schedule, found: Sequence[Measurement]) -> None:
    """The tables, or one JSON object; then the report of the whole results folder."""
    field = request.report
    if request.as_json:
        more = output.report_document(found, field) if field and found else {}
        output.print_json(document(found) | more)
    else:
        output.print_scope(asked, planned)
        if found:
            output.print_table(found, plain=request.plain, field=field)
    if found and not request.no_report:
        only = {cell.id for cell in asked.cells} if field else None
        output.write_report(request.results, quiet=request.as_json, field=field, only=only)
