"""``nfold bench``: measure a grid of plans."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from nfold.analysis.sections import group_sections
from nfold.bench.grid import Grid, GridAxes, build_grids, parse_axes
from nfold.bench.sweep import (
    DurationEstimate,
    SweepEvents,
    SweepSchedule,
    estimate_duration,
    run_sweep,
    schedule_sweep,
    sort_by_grid,
)
from nfold.cli import render, terminal
from nfold.cli.options import PlanOptions
from nfold.cli.plan_completion import build_plan_completer, epoch_samples, prepare_data
from nfold.cli.progress import RemainingTime, SweepProgress, describe_cell, format_short_duration
from nfold.cli.report_command import print_sections, save_report
from nfold.cli.signals import stop_on_signals
from nfold.cli.terminal import open_screen
from nfold.core.errors import UsageError
from nfold.core.format import pluralize
from nfold.core.machine import Machine
from nfold.core.measurement import Measurement, MeasurementStore
from nfold.core.plan import Plan
from nfold.core.serialization import JSON_SCHEMA_VERSION
from nfold.core.workload import Workload
from nfold.engines.base import get_framework
from nfold.fieldreports.catalog import (
    SELECTABLE_AXES,
    build_field_report,
    default_devices,
    find_report,
    select_axes,
)
from nfold.launch import workload_run
from nfold.launch.launch_spec import AgentServer, StopRequest
from nfold.launch.workload_run import run
from nfold.report.export import measurements_document
from nfold.store.store import Store
from nfold.telemetry.machine_inspection import inspect_machine

FAILED_STATUSES = ("crashed", "hung", "killed", "diverged")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(PlanOptions):
    """The options of ``nfold bench``, by the names of its parameters."""

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
            given = "neither" if self.workload is None else "both"
            raise UsageError(
                f"{given} of WORKLOAD and --report NAME: exactly one is needed; next: nfold bench "
                "digits, or nfold bench --report conv2d-devices --quick"
            )
        if self.quick and self.report is None:
            raise UsageError("--quick needs a field report; next: --report NAME --quick")
        super().__post_init__()

    @property
    def common_plan(self) -> Plan:
        """The plan fields that are the same in every cell."""
        lengths = {name: getattr(self, name) for name in ("steps", "epochs", "warmup_steps")}
        return Plan(**self.single_fields, **lengths)

    @property
    def repeats(self) -> int:
        """Runs per cell."""
        return self.repeat or (find_report(self.report).repeats if self.report else 1)


class NonWritingStore(MeasurementStore):
    """The store of a rank other than 0 in an attached job: only rank 0 writes."""

    def find(self, cell: str, repeat: int) -> Measurement | None:
        del cell, repeat
        return None

    def append(self, measurement: Measurement) -> None:
        pass


def run_bench(options: BenchOptions) -> int:
    """Measure the grid, print it, write the report; return the exit code."""
    machine = inspect_machine()
    complete = build_plan_completer(machine, options.data, measures=not options.dry_run)
    grid = build_grids(_axes(options, machine), machine, _unsupported, complete)
    attached = workload_run.in_external_job()
    if attached and workload_run.external_rank() != 0:
        return _run_as_follower(options, grid, machine)
    with Store.open(options.results) as store:
        again = options.again or attached
        schedule = schedule_sweep(grid, store, repeats=options.repeats, again=again)
        earlier = [m for m in store.measurements() if m.machine.id == machine.id]
        if options.dry_run:
            estimates = [estimate_duration(run.cell, earlier) for run in schedule.pending]
            print_sweep_plan(grid, schedule, estimates, as_json=options.as_json)
            return 0
        _prepare(options, grid)
        samples = functools.cache(epoch_samples)
        estimates = [estimate_duration(run.cell, earlier, samples) for run in schedule.pending]
        remaining = RemainingTime([estimate.seconds for estimate in estimates])
        with stop_on_signals() as stop, closing(AgentServer()) as agent_server:
            with open_screen(sys.stderr, plain=options.plain) as screen:
                measured = run_sweep(
                    schedule,
                    store=store,
                    machine=machine,
                    options=options.run_options(
                        in_process=options.in_process, stop=stop, agent_server=agent_server
                    ),
                    run=run,
                    events=SweepProgress(screen, remaining),
                )
            measured = sort_by_grid(grid, measured)
            _show(options, grid, schedule, measured)
        return _exit_code(measured, stop)


def _axes(options: BenchOptions, machine: Machine) -> list[GridAxes]:
    if options.report is None:
        axes = parse_axes(
            str(options.workload),
            options.axis_fields,
            common=options.common_plan,
            parameters=tuple(options.parameter or ()),
            scaling=options.scaling,
        )
        return [axes]
    spec = find_report(options.report)
    given = {name: text for name, text in options.axis_fields.items() if text is not None}
    devices = given.pop("devices", None)
    refused = [name for name in given if name not in SELECTABLE_AXES]
    refused += [name for name in ("parameter", "warmup_steps") if getattr(options, name)]
    refused += ["scaling"] if options.scaling != "strong" else []
    if refused:
        option = refused[0].replace("_", "-")
        raise UsageError(
            f"--{option} cannot be used with --report: the grid of {spec.name} is fixed; next: "
            "remove it, or measure your own grid with nfold bench WORKLOAD"
        )
    common = Plan(device=options.device, steps=options.steps, epochs=options.epochs)
    devices = devices or default_devices(machine, options.device)
    return select_axes(spec.grids(quick=options.quick), devices, common, given)


def _unsupported(workload: Workload, plan: Plan, machine: Machine) -> str | None:
    return get_framework(plan.framework).unsupported_reason(workload, plan, machine)


def _prepare(options: BenchOptions, grid: Grid) -> None:
    """Find the data before anything runs: missing data is one error, not a failed sweep."""
    cells = {
        (cell.workload, cell.plan.cache, cell.plan.input, cell.plan.bad_images): cell
        for cell in grid.cells
        if cell.unsupported_reason is None and not get_framework(cell.plan.framework).runs_in_parent
    }
    for cell in cells.values():
        prepare_data(cell.workload, cell.plan, options.data)


def _run_as_follower(options: BenchOptions, grid: Grid, machine: Machine) -> int:
    if options.dry_run:
        return 0
    store = NonWritingStore()
    schedule = schedule_sweep(grid, store, repeats=options.repeats, again=True)
    _prepare(options, grid)
    with stop_on_signals() as stop:
        measured = run_sweep(
            schedule,
            store=store,
            machine=machine,
            options=options.run_options(in_process=options.in_process, stop=stop),
            run=run,
            events=SweepEvents(),
        )
    return _exit_code(measured, stop)


def _exit_code(measured: Sequence[Measurement], stop: StopRequest) -> int:
    if stop.signum is not None:
        return 128 + stop.signum
    return 1 if any(measurement.status in FAILED_STATUSES for measurement in measured) else 0


def _show(
    options: BenchOptions, grid: Grid, schedule: SweepSchedule, measured: Sequence[Measurement]
) -> None:
    field = options.report
    report = build_field_report(field, measured) if field and measured else None
    if options.as_json:
        more = {"report": report.to_json()} if report else {}
        render.print_json(measurements_document(measured) | more)
    else:
        if measured:
            console = terminal.make_console(plain=options.plain)
            print_sections(group_sections(measured), console, report)
        render.print_line(describe_scope(grid, schedule))
    if measured and not options.no_report:
        only = {cell.id for cell in grid.cells} if field else None
        save_report(options.results, quiet=options.as_json, field=field, only=only)


def describe_scope(grid: Grid, schedule: SweepSchedule) -> str:
    """Return how many cells the grid has, and how many were merged or measured before."""
    words = [pluralize(len(grid.cells), "cell")]
    if grid.duplicates:
        words.append(f"{grid.duplicates} more are the same on one device")
    if schedule.done:
        failed = sum(m.status != "ok" for _, m in schedule.done)
        note = f", {failed} of them not ok" if failed else ""
        words.append(f"{len(schedule.done)} measured before{note} (--again measures them again)")
    return "; ".join(words)


def print_sweep_plan(
    grid: Grid, schedule: SweepSchedule, estimates: Sequence[DurationEstimate], *, as_json: bool
) -> None:
    """Print the grid and its estimated time."""
    total_s = sum(estimate.seconds for estimate in estimates)
    if as_json:
        planned = [
            {
                "cell": cell_run.cell.id,
                "workload": str(cell_run.cell.workload),
                "plan": cell_run.cell.plan.to_dict(),
                "repeat": cell_run.repeat,
                "unsupported": cell_run.cell.unsupported_reason,
                "estimated_seconds": estimate.seconds,
                "basis": estimate.basis,
            }
            for cell_run, estimate in zip(schedule.pending, estimates, strict=True)
        ]
        document = {
            "schema": JSON_SCHEMA_VERSION,
            "planned": planned,
            "measured_before": [measurement.id for _, measurement in schedule.done],
            "merged": grid.duplicates,
            "estimated_seconds": total_s,
        }
        render.print_json(document)
        return
    bases = ", ".join(dict.fromkeys(estimate.basis for estimate in estimates))
    about = f": about {format_short_duration(total_s)} ({bases})" if estimates else ""
    render.print_line(f"{describe_scope(grid, schedule)}{about}")
    for cell_run in schedule.pending:
        reason = cell_run.cell.unsupported_reason
        unsupported = f"  unsupported: {reason}" if reason else ""
        render.print_line(f"  {describe_cell(cell_run)}{unsupported}")
