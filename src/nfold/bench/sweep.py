"""Run a grid: stored cells are skipped, and each run is stored before the next one starts.

The time of a run is estimated from earlier measurements, or else from assumed rates.
"""

from __future__ import annotations

import dataclasses
import datetime
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nfold import workloads
from nfold.analysis.cells import Cell, epochs, samples_per_s
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
    cell, repeat = cell_run.cell, cell_run.repeat
    if cell.unsupported_reason is None:
        return run(cell.workload, cell.plan, machine=machine, options=options, repeat=repeat)
    return Measurement(
        id=f"{cell.id}-{repeat}-{secrets.token_hex(3)}",
        workload=cell.workload,
        plan=cell.plan,
        machine=machine,
        status="unsupported",
        repeat=repeat,
        cause=FailureCause(text=cell.unsupported_reason),
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def sort_by_grid(grid: Grid, measurements: Sequence[Measurement]) -> list[Measurement]:
    """Sort measurements in the order of the cells, then of the repeats."""
    position = {cell.id: number for number, cell in enumerate(grid.cells)}
    return sorted(measurements, key=lambda m: (position[m.cell], m.repeat))


# Orders of magnitude for small convolutional networks, not peaks of a device: per core, and per GPU
# in fp32 without tensor cores.
ASSUMED_FLOP_PER_S: Mapping[str, float] = {"cpu": 20e9, "cuda": 10e12}
ASSUMED_16_BIT_GAIN = 3.0
# start of the processes to the first step, and their end
ASSUMED_START_S: Mapping[str, float] = {"cpu": 6.0, "cuda": 15.0}
ASSUMED_OPERATION_PARTS = 12  # parts of an operation, each timed for all steps

# plan fields that do not change the speed
LENGTH_FIELDS = frozenset({"steps", "epochs", "warmup_steps", "seed"})
# plan fields that follow from the input: together one difference
INPUT_DEPENDENT_FIELDS = frozenset({"augment", "workers"})

EpochSamples = Callable[[Workload], int | None]  # samples of an epoch, None if only a run can tell


@dataclass(frozen=True)
class DurationEstimate:
    """Seconds of one run. ``basis`` is how they were found: measured, or assumed."""

    seconds: float
    basis: str


def estimate_duration(
    cell: GridCell, earlier: Sequence[Measurement], prepared: EpochSamples = lambda _: None
) -> DurationEstimate:
    """Estimate the time of one run of ``cell``.

    ``earlier`` are measurements on the same machine; the successful run with the nearest plan of the
    same workload decides. ``prepared`` returns the samples of an epoch; without it an epoch is the
    published training set.
    """
    if cell.unsupported_reason is not None:
        return DurationEstimate(0.0, "not run")
    if cell.plan.framework == "simulated":
        return DurationEstimate(0.0, "a virtual clock")
    known = [
        m
        for m in earlier
        if m.workload == cell.workload and m.status == "ok" and m.plan.framework != "simulated"
    ]
    epoch = (
        prepared(cell.workload)
        or workloads.parameters(cell.workload).get("samples")
        or workloads.info(cell.workload.name).training_samples
    )
    if not known:
        return _assumed(cell, epoch)
    nearest = min(known, key=lambda m: _distance(cell.plan, m.plan))
    return DurationEstimate(_scaled(cell, nearest, epoch), f"measured as {nearest.id}")


def _distance(plan: Plan, other: Plan) -> tuple[int, float]:
    differing = set(plan.diff(other)) - LENGTH_FIELDS
    differing -= INPUT_DEPENDENT_FIELDS if "input" in differing else set()
    mine, theirs = ((one.batch or 1) / (one.devices or 1) for one in (plan, other))
    return len(differing), max(mine, theirs) / min(mine, theirs)


def _scaled(cell: GridCell, measured: Measurement, epoch: int) -> float:
    plan, rate = cell.plan, samples_per_s(Cell(measurements=(measured,)))
    epochs_done = epochs(measured)
    measured_epoch = epochs_done[0].samples if epochs_done else 0
    ran = _samples(measured.plan, measured_epoch)
    if rate is None or not ran:
        return measured.wall_seconds
    stepping = min(ran / rate.value, measured.wall_seconds)
    planned = _samples(plan, measured_epoch or epoch)
    devices = (measured.plan.devices or 1) / (plan.devices or 1)
    return measured.wall_seconds - stepping + stepping * planned / ran * devices


def _samples(plan: Plan, epoch_samples: int) -> int:
    if plan.steps is not None:
        return (plan.steps + (plan.warmup_steps or 0)) * (plan.batch or 1)
    return (plan.epochs or 1) * epoch_samples


def _assumed(cell: GridCell, epoch: int) -> DurationEstimate:
    plan = cell.plan
    known = workloads.info(cell.workload.name)
    parts = ASSUMED_OPERATION_PARTS if known.kind == "operation" else 1
    samples = parts * _samples(plan, epoch)
    flop = samples * known.flop_per_sample(workloads.parameters(cell.workload))
    rate = _assumed_flop_per_s(plan)
    seconds = ASSUMED_START_S[plan.device or "cpu"] + flop / rate
    per_gpu = f"{rate / (plan.devices or 1) / 1e12:.0f} TFLOP/s a GPU"
    per_core = f"{ASSUMED_FLOP_PER_S['cpu'] / 1e9:.0f} GFLOP/s a core"
    return DurationEstimate(
        seconds, f"rough: assumes {per_core if plan.device == 'cpu' else per_gpu}"
    )


def _assumed_flop_per_s(plan: Plan) -> float:
    rate = ASSUMED_FLOP_PER_S[plan.device or "cpu"] * (plan.devices or 1)
    if plan.device == "cpu":
        return rate * (plan.cores_per_device or 1)
    return rate if plan.precision == "fp32" else rate * ASSUMED_16_BIT_GAIN
