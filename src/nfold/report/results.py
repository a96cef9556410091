"""The derived numbers of every cell, computed once for all tables, figures and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nfold import summary
from nfold.comparison import Comparison, compare_all
from nfold.measurement import Measurement
from nfold.plan import Plan
from nfold.stats import Interval
from nfold.summary import Cell


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """A cell with its numbers; None where the cell does not have one.

    Units: seconds, bytes, joules per 1,000 samples; ``accuracy`` is a fraction. ``comparison``
    is with one device. ``baseline`` tells whether another cell is compared with this one.
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
        """The plan of all its repeats."""
        return self.cell.first.plan

    @property
    def devices(self) -> int:
        """How many devices."""
        return self.plan.devices or 1

    @property
    def batch(self) -> int:
        """The global batch in samples."""
        return self.plan.batch or 0

    @property
    def succeeded(self) -> bool:
        """Whether any repeat ran to its end."""
        return bool(self.cell.successful)

    @property
    def failed_repeats(self) -> tuple[Measurement, ...]:
        """The repeats that did not."""
        return tuple(m for m in self.cell.measurements if m.status != "ok")


def compute_results(cells: Sequence[Cell]) -> list[CellResult]:
    """The numbers of every cell, in the order of the cells."""
    compared = {one.cell.first.cell: one for one in compare_all(cells)}
    baselines = {one.baseline.first.cell for one in compared.values()}
    return [
        CellResult(
            cell=cell,
            samples_per_s=summary.samples_per_s(cell),
            first_epoch_s=summary.first_epoch_s(cell),
            later_epochs_s=summary.later_epochs_s(cell),
            training_s=summary.total_epoch_s(cell),
            accuracy=summary.accuracy(cell),
            peak_memory_bytes=summary.peak_memory_bytes(cell),
            joules_per_1000=summary.joules_per_1000(cell),
            comparison=compared.get(cell.first.cell),
            is_baseline=cell.first.cell in baselines,
        )
        for cell in cells
    ]


def strong_or_weak_comparisons(found: Sequence[CellResult]) -> list[CellResult]:
    """Those compared with one device at the same batch; only without any, by share of it.

    The two are different questions: they share neither a sentence nor a figure.
    """
    compared = [(r.comparison.scaling, r) for r in found if r.comparison is not None]
    kind = min((scaling for scaling, _ in compared), default=None)
    return [result for scaling, result in compared if scaling == kind]
