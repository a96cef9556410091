"""Numbers derived from raw measurements: pure functions, used by every table and by JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nfold.core.measurement import Epoch, Measurement, RankSamples, Window
from nfold.core.serialization import serialize
from nfold.core.stats import Interval, bootstrap, bootstrap_grouped, median


@dataclass(frozen=True, kw_only=True)
class Cell:
    """All repeats of one measurement, oldest first; at least one."""

    measurements: tuple[Measurement, ...]

    @property
    def first(self) -> Measurement:
        """Any of them: workload, plan and machine are the same in all."""
        return self.measurements[0]

    @property
    def successful(self) -> tuple[Measurement, ...]:
        """The repeats that ran to their end."""
        return tuple(m for m in self.measurements if m.status == "ok")

    @property
    def first_failed_or_first(self) -> Measurement:
        """The repeat whose status the table shows: the first that failed, else the first."""
        failed = [m for m in self.measurements if m.status != "ok"]
        return failed[0] if failed else self.first


def group_cells(measurements: Sequence[Measurement]) -> list[Cell]:
    """Group repeats of the same question, in order of first appearance."""
    groups: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault(measurement.cell, []).append(measurement)
    return [Cell(measurements=tuple(group)) for group in groups.values()]


def window_rates(measurement: Measurement) -> list[float]:
    """Samples per second of each window: all ranks' samples over the slowest rank's time."""
    per_rank = [rank.windows for rank in measurement.ranks if rank.windows]
    if not per_rank:
        return []
    return [_rate(windows) for windows in zip(*per_rank, strict=False)]


def _rate(windows: Sequence[Window]) -> float:
    return sum(w.samples for w in windows) / max(w.seconds for w in windows)


def rate_groups(cell: Cell) -> list[list[float]]:
    """The window rates of every repeat that is ok and has any."""
    return [rates for rates in map(window_rates, cell.successful) if rates]


def samples_per_s(cell: Cell) -> Interval | None:
    """Median throughput over windows and repeats, None where nothing was timed."""
    groups = rate_groups(cell)
    return bootstrap_grouped(groups) if groups else None


def step_ms(cell: Cell) -> Interval | None:
    """Median wall milliseconds per step: each window's slowest rank over its steps."""
    groups = [_window_steps(m.ranks) for m in cell.successful]
    groups = [group for group in groups if group]
    return bootstrap_grouped(groups) if groups else None


def _window_steps(ranks: Sequence[RankSamples]) -> list[float]:
    per_rank = [rank.windows for rank in ranks if rank.windows]
    return [1e3 * max(w.seconds / w.steps for w in ws) for ws in zip(*per_rank, strict=False)]


def epochs(measurement: Measurement) -> tuple[Epoch, ...]:
    """The epochs as rank 0 saw them; every rank's samples are counted in them."""
    return measurement.ranks[0].epochs if measurement.ranks else ()


def first_step_ms(measurement: Measurement) -> float | None:
    """The slowest rank's first step: compilation, allocation, algorithm search."""
    known = [r.first_step_ms for r in measurement.ranks if r.first_step_ms is not None]
    return max(known, default=None)


def first_epoch_s(cell: Cell) -> float | None:
    """Median over repeats of the first epoch's wall seconds."""
    firsts = [epochs(m)[0].seconds for m in cell.successful if epochs(m)]
    return median(firsts) if firsts else None


def later_epochs_s(cell: Cell) -> float | None:
    """Median wall seconds of epochs 2 and later, over all repeats."""
    later = [epoch.seconds for m in cell.successful for epoch in epochs(m)[1:]]
    return median(later) if later else None


def total_epoch_s(cell: Cell) -> float | None:
    """Median over repeats of the sum of all epochs' wall seconds."""
    sums = [sum(e.seconds for e in epochs(m)) for m in cell.successful if epochs(m)]
    return median(sums) if sums else None


def accuracy(cell: Cell) -> Interval | None:
    """Median over repeats of the last epoch's test accuracy; bounds only with repeats."""
    last = [epochs(m)[-1].accuracy for m in cell.successful if epochs(m)]
    known = [value for value in last if value is not None]
    return bootstrap(known) if known else None


def peak_memory_bytes(cell: Cell) -> int | None:
    """The most that any rank of any repeat held, also of a repeat that failed."""
    return _most(cell, lambda rank: rank.peak_memory_bytes) or None


def data_bytes(cell: Cell) -> int | None:
    """Of the peak, what the resident data set takes: the most of any rank."""
    return _most(cell, lambda rank: rank.data_bytes)


def reserved_memory_bytes(cell: Cell) -> int | None:
    """The most memory that the framework took from any device, used or not."""
    return _most(cell, lambda rank: rank.reserved_memory_bytes)


def graph_bytes(cell: Cell) -> int | None:
    """Of the peak, what recorded graphs keep for themselves: the most of any rank."""
    return _most(cell, lambda rank: rank.graph_bytes)


def _most(cell: Cell, field: Callable[[RankSamples], int | None]) -> int | None:
    held = [field(rank) for m in cell.measurements for rank in m.ranks]
    return max((value for value in held if value is not None), default=None)


def joules_per_1000(cell: Cell) -> float | None:
    """Median over repeats of energy per 1,000 samples in the timed windows."""
    values = []
    for m in cell.successful:
        timed = sum(w.samples for rank in m.ranks for w in rank.windows)
        if m.energy_joules is not None and timed:
            values.append(1000 * m.energy_joules / timed)
    return median(values) if values else None


def measurement_json(measurement: Measurement) -> dict[str, Any]:
    """One entry of ``measurements`` in the versioned JSON that commands print."""
    alone = Cell(measurements=(measurement,))
    return {
        "id": measurement.id,
        "cell": measurement.cell,
        "workload": str(measurement.workload),
        "plan": measurement.plan.to_dict(),
        "repeat": measurement.repeat,
        "status": measurement.status,
        "cause": serialize(measurement.cause),
        "samples_per_s": serialize(samples_per_s(alone)),
        "step_ms": serialize(step_ms(alone)),
        "first_step_ms": first_step_ms(measurement),
        "epochs": [_epoch_json(epoch) for epoch in epochs(measurement)],
        "parts": [serialize(part) for rank in measurement.ranks for part in rank.parts],
        "peak_memory_bytes": [rank.peak_memory_bytes for rank in measurement.ranks],
        "data_bytes": [rank.data_bytes for rank in measurement.ranks],
        "graph_bytes": [rank.graph_bytes for rank in measurement.ranks],
        "reserved_memory_bytes": [rank.reserved_memory_bytes for rank in measurement.ranks],
        "energy_joules": measurement.energy_joules,
        "telemetry": f"{measurement.folder}/telemetry.csv" if measurement.folder else None,
        "warnings": [serialize(doubt) for doubt in measurement.warnings],
    }


def _epoch_json(epoch: Epoch) -> dict[str, Any]:
    return {
        "seconds": epoch.seconds,
        "train_loss": epoch.train_loss,
        "accuracy": epoch.accuracy,
    }
