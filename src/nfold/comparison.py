"""Speedup: which cell is compared with which, and the ratio with its interval. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nfold.plain import serialize
from nfold.plan import Plan
from nfold.stats import MIN_PAIRS, Interval, ratio_of_grouped
from nfold.summary import Cell, rate_groups, window_rates

BASELINE_DIFFERENCES = ("devices", "strategy", "cores_per_device", "workers")
"""Fields that differ between a plan and the same plan on one device."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A cell against its one-device baseline: throughput ratio, and that over N.

    ``scaling`` is ``strong`` where the global batch is the same, ``weak`` where the batch per
    device is.
    """

    baseline: Cell
    cell: Cell
    scaling: Literal["strong", "weak"]
    speedup: Interval

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
        """One entry of ``comparisons`` in the versioned JSON."""
        return {
            "baseline": self.baseline.first.id,
            "id": self.cell.first.id,
            "scaling": self.scaling,
            "speedup": serialize(self.speedup),
            "efficiency": serialize(self.efficiency),
        }


def compare_all(cells: Sequence[Cell]) -> list[Comparison]:
    """Every cell on several devices against the same plan on one, where both were timed."""
    found = [
        compare_with_baseline(cell, cells) for cell in cells if (cell.first.plan.devices or 1) > 1
    ]
    return [comparison for comparison in found if comparison is not None]


def compare_with_baseline(cell: Cell, among: Sequence[Cell]) -> Comparison | None:
    """Compare ``cell`` with its baseline in ``among``: the same global batch first, else weak."""
    rates = rate_groups(cell)
    plan = cell.first.plan
    for scaling, batch in _baseline_batches(plan):
        for other in among:
            if _is_baseline(other, cell, batch) and rates and rate_groups(other):
                speedup = ratio_of_grouped(*_paired(cell, other))
                return Comparison(baseline=other, cell=cell, scaling=scaling, speedup=speedup)
    return None


def throughput_ratio(cell: Cell, other: Cell) -> Interval | None:
    """The throughput of ``cell`` over that of ``other``, by repeat where three are in both."""
    if not rate_groups(cell) or not rate_groups(other):
        return None
    return ratio_of_grouped(*_paired(cell, other))


def _paired(cell: Cell, other: Cell) -> tuple[list[list[float]], list[list[float]]]:
    """The window rates of both, by repeat: only the repeats that both have, where three do.

    Repeat i of both ran one after the other; a repeat that failed or was run again later must
    not be paired with another one's neighbour.
    """
    mine, theirs = _rates_by_repeat(cell), _rates_by_repeat(other)
    common = sorted(mine.keys() & theirs.keys())
    if len(common) < MIN_PAIRS:
        return rate_groups(cell), rate_groups(other)
    return [mine[repeat] for repeat in common], [theirs[repeat] for repeat in common]


def _rates_by_repeat(cell: Cell) -> dict[int, list[float]]:
    found = {m.repeat: window_rates(m) for m in cell.successful}
    return {repeat: rates for repeat, rates in found.items() if rates}


def _baseline_batches(plan: Plan) -> list[tuple[Literal["strong", "weak"], int]]:
    batch, devices = plan.batch or 0, plan.devices or 1
    weak: list[tuple[Literal["strong", "weak"], int]] = [("weak", batch // devices)]
    return [("strong", batch), *(weak if batch % devices == 0 else [])]


def _is_baseline(other: Cell, cell: Cell, batch: int) -> bool:
    mine, theirs = cell.first, other.first
    return (
        theirs.plan.devices == 1
        and theirs.plan.batch == batch
        and theirs.workload == mine.workload
        and theirs.machine.id == mine.machine.id
        and theirs.variant == mine.variant
        and set(mine.plan.diff(theirs.plan)) <= {*BASELINE_DIFFERENCES, "batch"}
        and _same_share(mine.plan, theirs.plan)
    )


def _same_share(plan: Plan, other: Plan) -> bool:
    """CPU devices compare only where each is the same number of cores; GPUs always do."""
    return plan.device != "cpu" or plan.cores_per_device == other.cores_per_device
