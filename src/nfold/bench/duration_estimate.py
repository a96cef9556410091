"""Estimate how long a grid takes, from earlier measurements or else from assumed rates.

The assumed rates are orders of magnitude for small convolutional networks, not peaks of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nfold import workloads
from nfold.analysis.cells import Cell, epochs, samples_per_s
from nfold.bench.grid import GridCell
from nfold.core.measurement import Measurement
from nfold.core.plan import Plan
from nfold.core.workload import Workload

# per core, and per GPU in fp32 without tensor cores
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


@dataclass(frozen=True, kw_only=True)
class DurationEstimate:
    """Seconds of one run. ``basis`` is how they were found: measured, or assumed."""

    seconds: float
    basis: str


def estimate_duration(
    cell: GridCell, earlier: Sequence[Measurement], prepared: EpochSamples = lambda _: None
) -> DurationEstimate:
    """Estimate the time of one run of ``cell``.

    ``earlier`` are measurements on the same machine; the successful run with the nearest plan of the
    same workload decides. ``prepared`` returns the samples of an
    epoch; without it an epoch is the published training set.
    """
    if cell.unsupported_reason is not None:
        return DurationEstimate(seconds=0.0, basis="not run")
    if cell.plan.framework == "simulated":
        return DurationEstimate(seconds=0.0, basis="a virtual clock")
    known = [m for m in earlier if m.workload == cell.workload and _usable(m)]
    epoch = prepared(cell.workload) or _published(cell)
    if not known:
        return _assumed(cell, epoch)
    nearest = min(known, key=lambda m: _distance(cell.plan, m.plan))
    return DurationEstimate(
        seconds=_scaled(cell, nearest, epoch), basis=f"measured as {nearest.id}"
    )


def _usable(measurement: Measurement) -> bool:
    return measurement.status == "ok" and measurement.plan.framework != "simulated"


def _distance(plan: Plan, other: Plan) -> tuple[int, float]:
    differing = set(plan.diff(other)) - LENGTH_FIELDS
    differing -= INPUT_DEPENDENT_FIELDS if "input" in differing else set()
    mine, theirs = _batch_per_device(plan), _batch_per_device(other)
    return len(differing), max(mine, theirs) / min(mine, theirs)


def _batch_per_device(plan: Plan) -> float:
    return (plan.batch or 1) / (plan.devices or 1)


def _scaled(cell: GridCell, measured: Measurement, epoch: int) -> float:
    plan, rate = cell.plan, samples_per_s(Cell(measurements=(measured,)))
    ran = _samples(measured.plan, _epoch_samples(measured))
    if rate is None or not ran:
        return measured.wall_seconds
    stepping = min(ran / rate.value, measured.wall_seconds)
    planned = _samples(plan, _epoch_samples(measured) or epoch)
    devices = (measured.plan.devices or 1) / (plan.devices or 1)
    return measured.wall_seconds - stepping + stepping * planned / ran * devices


def _epoch_samples(measured: Measurement) -> int:
    finished = epochs(measured)
    return finished[0].samples if finished else 0


def _published(cell: GridCell) -> int:
    allowed = workloads.parameters(cell.workload).get("samples")
    return allowed or workloads.info(cell.workload.name).training_samples


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
    seconds = ASSUMED_START_S[plan.device or "cpu"] + flop / _assumed_flop_per_s(plan)
    return DurationEstimate(seconds=seconds, basis=_assumption(plan))


def _assumed_flop_per_s(plan: Plan) -> float:
    rate = ASSUMED_FLOP_PER_S[plan.device or "cpu"] * (plan.devices or 1)
    if plan.device == "cpu":
        return rate * (plan.cores_per_device or 1)
    return rate if plan.precision == "fp32" else rate * ASSUMED_16_BIT_GAIN


def _assumption(plan: Plan) -> str:
    if plan.device == "cpu":
        return f"rough: assumes {ASSUMED_FLOP_PER_S['cpu'] / 1e9:.0f} GFLOP/s a core"
    rate = _assumed_flop_per_s(plan) / (plan.devices or 1)
    return f"rough: assumes {rate / 1e12:.0f} TFLOP/s a GPU"
