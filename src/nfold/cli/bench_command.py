"""What ``nfold bench`` does once its options are read."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from nfold.bench.duration_estimate import DurationEstimate, estimate_duration
from nfold.bench.grid import Grid, GridAxes, build_grids, parse_axes
from nfold.bench.sweep import SweepEvents, SweepSchedule, run_sweep, schedule_sweep, sort_by_grid
from nfold.cli import render
from nfold.cli.options import PlanOptions
from nfold.cli.plan_completion import build_plan_completer, epoch_samples, prepare_data
from nfold.cli.progress import RemainingTime, SweepProgress
from nfold.cli.signals import stop_on_signals
from nfold.cli.terminal import open_screen
from nfold.core.errors import UsageError
from nfold.core.machine import Machine
from nfold.core.measurement import Measurement, MeasurementStore
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.engines.base import get_framework
from nfold.fieldreports.catalog import (
    SELECTABLE_AXES,
    ReportSelection,
    default_devices,
    find_report,
    select_axes,
)
from nfold.launch import workload_run
from nfold.launch.launch_spec import WarmAgent
from nfold.launch.workload_run import run
from nfold.report.export import measurements_document
from nfold.store.store import Store
from nfold.telemetry.machine_inspection import inspect_machine

FAILED_STATUSES = ("crashed", "hung", "killed", "diverged")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(PlanOptions):
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
    def common_plan(self) -> Plan:
        """What holds in every cell."""
        return Plan(
            **self.single_fields,
            steps=self.steps,
            epochs=self.epochs,
            warmup_steps=self.warmup_steps,
        )

    @property
    def repeats(self) -> int:
        """Runs of every cell."""
        return self.repeat or (find_report(self.report).repeats if self.report else 1)


class NonWritingStore(MeasurementStore):
    """The store of a rank other than 0 in an attached job: rank 0 writes, the others do not."""

    def find(self, cell: str, repeat: int) -> Measurement | None:
        del cell, repeat
        return None

    def append(self, measurement: Measurement) -> None:
        """Leave it to rank 0."""


def run_bench(request: BenchOptions) -> int:
    """Measure the grid, print, report; the exit code."""
    machine = inspect_machine()
    asked = _grid(request, machine)
    if workload_run.in_external_job() and workload_run.external_rank() != 0:
        return _follow(request, asked, machine)
    with Store.open(request.results) as store:
        again = request.again or workload_run.in_external_job()
        planned = schedule_sweep(asked, store, repeats=request.repeats, again=again)
        earlier = [m for m in store.measurements() if m.machine.id == machine.id]
        if request.dry_run:
            expected = [estimate_duration(turn.cell, earlier) for turn in planned.pending]
            render.print_sweep_plan(asked, planned, expected, as_json=request.as_json)
            return 0
        _prepare(request, asked)
        prepared = functools.cache(epoch_samples)
        expected = [estimate_duration(turn.cell, earlier, prepared) for turn in planned.pending]
        return _measure(request, asked, planned, expected, store, machine)


def _measure(
    request: BenchOptions,
    grid: Grid,
    planned: SweepSchedule,
    expected: Sequence[DurationEstimate],
    store: Store,
    machine: Machine,
) -> int:
    with stop_on_signals() as stop, closing(WarmAgent()) as spare:
        left = RemainingTime([part.seconds for part in expected])
        with open_screen(sys.stderr, plain=request.plain) as shown:
            measured = run_sweep(
                planned,
                store=store,
                machine=machine,
                options=request.run_options(
                    in_process=request.in_process, stop=stop, warm_agent=spare
                ),
                run=run,
                events=SweepProgress(shown, left),
            )
        found = sort_by_grid(grid, measured)
        _show(request, grid, planned, found)
    return 128 + stop.signum if stop.signum is not None else _exit_code(found)


def _grid(request: BenchOptions, machine: Machine) -> Grid:
    complete = build_plan_completer(machine, request.data, measures=not request.dry_run)
    return build_grids(_axes(request, machine), machine, _unsupported, complete)


def _axes(request: BenchOptions, machine: Machine) -> list[GridAxes]:
    if request.report is not None:
        return field_report_axes(request, machine)
    axes = parse_axes(
        str(request.workload),
        request.axis_fields,
        common=request.common_plan,
        parameters=tuple(request.parameter or ()),
        scaling=request.scaling,
    )
    return [axes]


def field_report_axes(request: BenchOptions, machine: Machine) -> list[GridAxes]:
    """The grids of a field report on this machine, narrowed as asked; UsageError for the rest."""
    asked = find_report(str(request.report))
    said = {name: text for name, text in request.axis_fields.items() if text is not None}
    devices = said.pop("devices", None)
    refused = [name for name in said if name not in SELECTABLE_AXES]
    refused += [name for name in ("parameter", "warmup_steps") if getattr(request, name)]
    refused += ["scaling"] if request.scaling != "strong" else []
    if refused:
        option = refused[0].replace("_", "-")
        raise UsageError(
            f"--{option} does not go with --report: the grid of {asked.name} is fixed; next: leave "
            "it out, or measure a grid of your own with nfold bench WORKLOAD"
        )
    chosen = ReportSelection(
        devices=devices or default_devices(machine, request.device),
        device=request.device,
        steps=request.steps,
        epochs=request.epochs,
        axis_values=said,
    )
    return select_axes(asked.grids(quick=request.quick), chosen)


def _unsupported(workload: Workload, plan: Plan, machine: Machine) -> str | None:
    return get_framework(plan.framework).unsupported_reason(workload, plan, machine)


def _prepare(request: BenchOptions, grid: Grid) -> None:
    """Find the data once, before anything runs: missing data is one error, not a failed sweep.

    Cells that do not run, and the simulated framework, read none.
    """
    reading = [c for c in grid.cells if c.unsupported_reason is None and not _in_parent(c.plan)]
    kept = {(c.workload, c.plan.cache, c.plan.input, c.plan.bad_images): c for c in reading}
    for cell in kept.values():
        prepare_data(cell.workload, cell.plan, request.data)


def _in_parent(plan: Plan) -> bool:
    return get_framework(plan.framework).runs_in_parent


def _follow(request: BenchOptions, grid: Grid, machine: Machine) -> int:
    if request.dry_run:
        return 0
    store = NonWritingStore()
    planned = schedule_sweep(grid, store, repeats=request.repeats, again=True)
    _prepare(request, grid)
    with stop_on_signals() as stop:
        done = run_sweep(
            planned,
            store=store,
            machine=machine,
            options=request.run_options(in_process=request.in_process, stop=stop),
            run=run,
            events=SweepEvents(),
        )
    return 128 + stop.signum if stop.signum is not None else _exit_code(done)


def _exit_code(found: Sequence[Measurement]) -> int:
    return 1 if any(measurement.status in FAILED_STATUSES for measurement in found) else 0


def _show(
    request: BenchOptions, grid: Grid, planned: SweepSchedule, found: Sequence[Measurement]
) -> None:
    field = request.report
    if request.as_json:
        more = render.field_report_document(found, field) if field and found else {}
        render.print_json(measurements_document(found) | more)
    else:
        render.print_sweep_scope(grid, planned)
        if found:
            render.print_cell_tables(found, plain=request.plain, field=field)
    if found and not request.no_report:
        only = {cell.id for cell in grid.cells} if field else None
        render.save_report(request.results, quiet=request.as_json, field=field, only=only)
