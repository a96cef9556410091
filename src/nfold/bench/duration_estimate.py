"""How long a grid will take: from earlier measurements where there are any, else roughly.

The rough rates are assumptions and are said to be: they are a careful user's order of magnitude
for small convolution networks, not a device's peak.
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

ASSUMED_FLOP_PER_S: Mapping[str, float] = {"cpu": 20e9, "cuda": 10e12}
"""Of one core, and of one GPU in fp32 without tensor cores."""
ASSUMED_16_BIT_GAIN = 3.0
ASSUMED_START_S: Mapping[str, float] = {"cpu": 6.0, "cuda": 15.0}
"""From the start of the processes to the first step, and their end."""
ASSUMED_OPERATION_PARTS = 12
"""Parts that an operation times one after the other, each for all steps."""

LENGTH_FIELDS = frozenset({"steps", "epochs", "warmup_steps", "seed"})
"""Fields of a plan that do not change its speed."""
INPUT_DEPENDENT_FIELDS = frozenset({"augment", "workers"})
"""Fields that are other ones with another input: together they are one difference."""


EpochSamples = Callable[[Workload], int | None]
"""Samples of a workload's epoch; None where nobody knows before it was run."""


@dataclass(frozen=True, kw_only=True)
class DurationEstimate:
    """Seconds of one run; ``basis`` says how it was found: measured, or assumed."""

    seconds: float
    basis: str


def estimate_duration(
    cell: GridCell, earlier: Sequence[Measurement], prepared: EpochSamples = lambda _: None
) -> DurationEstimate:
    """How long one run of ``cell`` takes.

    ``earlier`` are measurements of any workload on the same machine; the nearest plan of the
    same workload that ran to its end decides. An epoch nobody has measured yet has as many samples
    as were ``prepared``; where nothing was, it is as long as the published training set.
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
    asked = _samples(plan, _epoch_samples(measured) or epoch)
    devices = (measured.plan.devices or 1) / (plan.devices or 1)
    return measured.wall_seconds - stepping + stepping * asked / ran * devices


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
