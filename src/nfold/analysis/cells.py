"""Cells, repeats of a measurement, and their numbers. Pure functions for tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nfold.analysis.step_time import window_step_times
from nfold.core.measurement import Epoch, Measurement
from nfold.core.serialization import serialize
from nfold.core.stats import Interval, bootstrap, bootstrap_grouped, median

MEMORY_FIELDS = ("peak_memory_bytes", "data_bytes", "graph_bytes", "reserved_memory_bytes")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """All repeats of one measurement, oldest first; at least one."""

    measurements: tuple[Measurement, ...]

    @property
    def first(self) -> Measurement:
        """The first repeat; workload, plan and machine are the same in all."""
        return self.measurements[0]

    @property
    def successful(self) -> tuple[Measurement, ...]:
        return tuple(m for m in self.measurements if m.status == "ok")

    @property
    def first_failed_or_first(self) -> Measurement:
        """The repeat whose status a table shows."""
        return next((m for m in self.measurements if m.status != "ok"), self.first)


def group_cells(measurements: Sequence[Measurement]) -> list[Cell]:
    """Group repeats by cell, in order of first appearance."""
    groups: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault(measurement.cell, []).append(measurement)
    return [Cell(measurements=tuple(group)) for group in groups.values()]


def window_rates(measurement: Measurement) -> list[float]:
    """Return samples per second of each window: samples of all ranks over the slowest rank's time."""
    per_rank = [rank.windows for rank in measurement.ranks if rank.windows]
    return [
        sum(w.samples for w in windows) / max(w.seconds for w in windows)
        for windows in zip(*per_rank, strict=False)
    ]


def rate_groups(cell: Cell) -> list[list[float]]:
    """Return the window rates of every successful repeat that has any."""
    return [rates for rates in map(window_rates, cell.successful) if rates]


def samples_per_s(cell: Cell) -> Interval | None:
    """Return the median throughput over windows and repeats, None without windows."""
    return _median_over_groups(rate_groups(cell))


def step_ms(cell: Cell) -> Interval | None:
    """Return the median milliseconds per step over windows and repeats."""
    groups = [[ms for ms, _ in window_step_times(m)] for m in cell.successful]
    return _median_over_groups([group for group in groups if group])


def _median_over_groups(groups: list[list[float]]) -> Interval | None:
    return bootstrap_grouped(groups) if groups else None


def epochs(measurement: Measurement) -> tuple[Epoch, ...]:
    """Return the epochs of rank 0, which count the samples of all ranks."""
    return measurement.ranks[0].epochs if measurement.ranks else ()


def first_step_ms(measurement: Measurement) -> float | None:
    """Return the first step of the slowest rank: compilation, allocation, algorithm search."""
    known = [r.first_step_ms for r in measurement.ranks if r.first_step_ms is not None]
    return max(known, default=None)


def first_epoch_s(cell: Cell) -> float | None:
    """Return the median over repeats of the first epoch's wall time."""
    return _median([epochs(m)[0].seconds for m in cell.successful if epochs(m)])


def later_epochs_s(cell: Cell) -> float | None:
    """Return the median wall time of epochs 2 and later over all repeats."""
    return _median([epoch.seconds for m in cell.successful for epoch in epochs(m)[1:]])


def total_epoch_s(cell: Cell) -> float | None:
    """Return the median over repeats of the sum of all epochs' wall time."""
    return _median([sum(e.seconds for e in epochs(m)) for m in cell.successful if epochs(m)])


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def accuracy(cell: Cell) -> Interval | None:
    """Return the median over repeats of the last epoch's test accuracy."""
    last = [epochs(m)[-1].accuracy for m in cell.successful if epochs(m)]
    known = [value for value in last if value is not None]
    return bootstrap(known) if known else None


def peak_memory_bytes(cell: Cell) -> int | None:
    """Return the peak of any rank and repeat, failed repeats included."""
    return maximum_bytes(cell, "peak_memory_bytes") or None


def maximum_bytes(cell: Cell, field: str) -> int | None:
    """Return the maximum of a field of RankSamples over ranks and repeats."""
    values = [getattr(rank, field) for m in cell.measurements for rank in m.ranks]
    return max((value for value in values if value is not None), default=None)


def joules_per_1000(cell: Cell) -> float | None:
    """Return the median over repeats of energy per 1,000 samples in the timed windows."""
    values = []
    for m in cell.successful:
        timed = sum(w.samples for rank in m.ranks for w in rank.windows)
        if m.energy_joules is not None and timed:
            values.append(1000 * m.energy_joules / timed)
    return _median(values)


def measurement_json(measurement: Measurement) -> dict[str, Any]:
    """Return an entry of ``measurements`` in the JSON that commands print."""
    cell = Cell(measurements=(measurement,))
    return {
        "id": measurement.id,
        "cell": measurement.cell,
        "workload": str(measurement.workload),
        "plan": measurement.plan.to_dict(),
        "repeat": measurement.repeat,
        "status": measurement.status,
        "cause": serialize(measurement.cause),
        "samples_per_s": serialize(samples_per_s(cell)),
        "step_ms": serialize(step_ms(cell)),
        "first_step_ms": first_step_ms(measurement),
        "epochs": [
            {"seconds": e.seconds, "train_loss": e.train_loss, "accuracy": e.accuracy}
            for e in epochs(measurement)
        ],
        "parts": [serialize(part) for rank in measurement.ranks for part in rank.parts],
        **{name: [getattr(rank, name) for rank in measurement.ranks] for name in MEMORY_FIELDS},
        "energy_joules": measurement.energy_joules,
        "telemetry": f"{measurement.folder}/telemetry.csv" if measurement.folder else None,
        "warnings": [serialize(caveat) for caveat in measurement.warnings],
    }
