"""Comparisons of cells with their baselines on one device: speedup and efficiency. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nfold.analysis import cells as cells_module
from nfold.analysis.cells import Cell, rate_groups, window_rates
from nfold.core.measurement import Caveat
from nfold.core.plan import Plan
from nfold.core.serialization import serialize
from nfold.core.stats import MIN_PAIRS, Interval, ratio_of_grouped

BASELINE_DIFFERENCES = ("devices", "strategy", "cores_per_device", "workers")
"""Fields that may differ between a plan and its baseline on one device.

``cores_per_device`` may differ on GPUs only. A comparison whose ``workers`` differ has a caveat.
"""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A cell on N devices and its baseline on one device.

    ``scaling`` is ``strong`` for equal global batches, ``weak`` for equal batches per device.
    """

    baseline: Cell
    cell: Cell
    scaling: Literal["strong", "weak"]
    speedup: Interval

    @property
    def caveats(self) -> tuple[Caveat, ...]:
        """Reasons why the speedup may not be due to the devices alone.

        Kinds are ``weak_scaling``, ``different_workers`` and ``superlinear``.
        """
        found = []
        if self.scaling == "weak":
            text = "weak scaling: compared with one device at its share of the batch"
            found.append(Caveat(kind="weak_scaling", text=text))
        plan, baseline = self.cell.first.plan, self.baseline.first.plan
        if not _same_workers(plan, baseline):
            text = (
                f"{plan.workers} loader workers per device against {baseline.workers} on one device: "
                "part of the speedup may be due to the workers"
            )
            found.append(Caveat(kind="different_workers", text=text))
        if round(100 * self.efficiency.value) > 100:
            text = "efficiency over 100 %: due to caches, noise, or an unfair comparison"
            found.append(Caveat(kind="superlinear", text=text, value=self.efficiency.value))
        return tuple(found)

    @property
    def efficiency(self) -> Interval:
        """Speedup over the number of devices; 1.0 is N-fold."""
        n = self.cell.first.plan.devices or 1
        low, high = self.speedup.low, self.speedup.high
        return Interval(
            self.speedup.value / n,
            None if low is None else low / n,
            None if high is None else high / n,
        )

    def to_json(self) -> dict[str, Any]:
        """Return an entry of ``comparisons`` in the JSON that commands print."""
        return {
            "baseline": self.baseline.first.id,
            "id": self.cell.first.id,
            "scaling": self.scaling,
            "speedup": serialize(self.speedup),
            "efficiency": serialize(self.efficiency),
            "warnings": [serialize(caveat) for caveat in self.caveats],
        }


def compare_all(cells: Sequence[Cell]) -> list[Comparison]:
    """Compare every cell on several devices with its baseline, if both were timed."""
    several = [cell for cell in cells if (cell.first.plan.devices or 1) > 1]
    return [found for cell in several if (found := compare_with_baseline(cell, cells)) is not None]


def compare_with_baseline(cell: Cell, among: Sequence[Cell]) -> Comparison | None:
    """Compare ``cell`` with its baseline in ``among``.

    Prefers a baseline with the same global batch (strong scaling) to one with the same batch per
    device (weak scaling), then one with the same number of loader workers.
    """
    plan = cell.first.plan
    batch, devices = plan.batch or 0, plan.devices or 1
    batches: list[tuple[Literal["strong", "weak"], int]] = [("strong", batch)]
    if batch % devices == 0:
        batches.append(("weak", batch // devices))
    for scaling, one_device_batch in batches if rate_groups(cell) else ():
        found = [o for o in among if _is_baseline(o, cell, one_device_batch) and rate_groups(o)]
        if found:
            best = min(found, key=lambda other: not _same_workers(plan, other.first.plan))
            speedup = ratio_of_grouped(*_paired(cell, best))
            return Comparison(baseline=best, cell=cell, scaling=scaling, speedup=speedup)
    return None


def throughput_ratio(cell: Cell, other: Cell) -> Interval | None:
    """Return the throughput of ``cell`` over that of ``other``, None if one was not timed."""
    if not rate_groups(cell) or not rate_groups(other):
        return None
    return ratio_of_grouped(*_paired(cell, other))


def _paired(cell: Cell, other: Cell) -> tuple[list[list[float]], list[list[float]]]:
    # Repeat i of both cells ran one after the other. A repeat that failed, or was repeated later,
    # must not be paired with a neighbour of another repeat.
    mine, theirs = _rates_by_repeat(cell), _rates_by_repeat(other)
    common = sorted(mine.keys() & theirs.keys())
    if len(common) < MIN_PAIRS:
        return rate_groups(cell), rate_groups(other)
    return [mine[repeat] for repeat in common], [theirs[repeat] for repeat in common]


def _rates_by_repeat(cell: Cell) -> dict[int, list[float]]:
    found = {m.repeat: window_rates(m) for m in cell.successful}
    return {repeat: rates for repeat, rates in found.items() if rates}


def _is_baseline(other: Cell, cell: Cell, batch: int) -> bool:
    mine, theirs = cell.first, other.first
    return (
        theirs.plan.devices == 1
        and theirs.plan.batch == batch
        and theirs.workload == mine.workload
        and theirs.machine.id == mine.machine.id
        and theirs.variant == mine.variant
        and set(mine.plan.diff(theirs.plan)) <= {*BASELINE_DIFFERENCES, "batch"}
        and (
            mine.plan.device != "cpu" or mine.plan.cores_per_device == theirs.plan.cores_per_device
        )
    )


def _same_workers(plan: Plan, other: Plan) -> bool:
    return plan.input != "loader" or plan.workers == other.workers


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """A cell with its numbers in seconds, bytes and joules; None if there is no value.

    ``accuracy`` is a fraction. ``comparison`` is with the baseline on one device; ``is_baseline``:
    other cells are compared with this one.
    """

    cell: Cell
    samples_per_s: Interval | None
    first_epoch_s: float | None
    later_epochs_s: float | None
    training_s: float | None
    accuracy: Interval | None
    peak_memory_bytes: int | None
    joules_per_1000: float | None
    comparison: Comparison | None
    is_baseline: bool

    @property
    def plan(self) -> Plan:
        return self.cell.first.plan

    @property
    def devices(self) -> int:
        return self.plan.devices or 1

    @property
    def batch(self) -> int:
        return self.plan.batch or 0

    @property
    def speedup(self) -> Interval | None:
        return self.comparison.speedup if self.comparison else None

    @property
    def efficiency(self) -> Interval | None:
        return self.comparison.efficiency if self.comparison else None

    @property
    def succeeded(self) -> bool:
        return bool(self.cell.successful)


def compute_results(cells: Sequence[Cell]) -> list[CellResult]:
    """Return the numbers of every cell, in the order of the cells."""
    compared = {found.cell.first.cell: found for found in compare_all(cells)}
    baselines = {found.baseline.first.cell for found in compared.values()}
    return [
        CellResult(
            cell=cell,
            samples_per_s=cells_module.samples_per_s(cell),
            first_epoch_s=cells_module.first_epoch_s(cell),
            later_epochs_s=cells_module.later_epochs_s(cell),
            training_s=cells_module.total_epoch_s(cell),
            accuracy=cells_module.accuracy(cell),
            peak_memory_bytes=cells_module.peak_memory_bytes(cell),
            joules_per_1000=cells_module.joules_per_1000(cell),
            comparison=compared.get(cell.first.cell),
            is_baseline=cell.first.cell in baselines,
        )
        for cell in cells
    ]


def strong_or_weak_comparisons(found: Sequence[CellResult]) -> list[CellResult]:
    """Return the results with strong scaling, or else those with weak scaling.

    The two answer different questions and are never mixed in a sentence or a figure.
    """
    compared = [(r.comparison.scaling, r) for r in found if r.comparison is not None]
    kind = min((scaling for scaling, _ in compared), default=None)
    return [result for scaling, result in compared if scaling == kind]
