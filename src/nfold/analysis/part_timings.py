"""Timings of the parts of an operation, per cell and per rank."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from nfold.analysis import cell_labels
from nfold.analysis.comparison import CellResult
from nfold.core.format import terminal_safe
from nfold.core.measurement import OperationPart
from nfold.core.stats import Interval, bootstrap

BASELINE_COLUMN = "without the devices"  # of parts that run on the CPU, in another library


@dataclass(frozen=True, kw_only=True)
class PartTiming:
    """One part in one column: time per call with the whole batch, and throughput."""

    part: str
    column: str
    baseline: bool
    ms: Interval
    bytes_per_s: float | None
    notes: tuple[str, ...] = ()


def part_timings(found: Sequence[CellResult]) -> list[PartTiming]:
    """Return every part of every successful cell, and baselines once per batch."""
    cells = [result.cell for result in found]
    shown = ("devices",) if len(cells) == 1 else cell_labels.varying_axes(cells)
    several = len({result.batch for result in found}) > 1
    grouped: dict[tuple[str, str, bool, int], list[OperationPart]] = defaultdict(list)
    for result in sorted(found, key=lambda r: (r.batch, r.devices)):
        label = cell_labels.cell_label(result.cell.first, shown)
        for measurement in result.cell.successful:
            for part in _slowest_ranks([list(rank.parts) for rank in measurement.ranks]):
                column = BASELINE_COLUMN if part.baseline else label
                suffix = f" · batch {result.batch}" if part.baseline and several else ""
                key = (part.name + suffix, column, part.baseline, result.batch)
                grouped[key].append(part)
    return [_timing(*key, parts) for key, parts in grouped.items()]


def _slowest_ranks(per_rank: Sequence[list[OperationPart]]) -> list[OperationPart]:
    named: dict[str, list[OperationPart]] = defaultdict(list)
    for parts in per_rank:
        for part in parts:
            named[part.name].append(part)
    return [
        dataclasses.replace(
            parts[0],
            seconds=tuple(map(max, zip(*(part.seconds for part in parts), strict=False))),
            note="; ".join(dict.fromkeys(part.note for part in parts if part.note)),
        )
        for parts in named.values()
    ]


def _timing(
    name: str, column: str, baseline: bool, batch: int, parts: Sequence[OperationPart]
) -> PartTiming:
    # A baseline on fewer images is scaled to the batch, with a note. A single call, the first,
    # has no throughput: its time is not due to the bytes.
    scales = [batch / part.images if baseline and part.images else 1.0 for part in parts]
    pairs = list(zip(parts, scales, strict=True))
    ms = bootstrap([1e3 * s * scale for part, scale in pairs for s in part.seconds])
    moved = max(part.bytes * scale for part, scale in pairs)
    repeated = all(len(part.seconds) > 1 for part in parts)
    notes = [
        part.note + (", scaled up to the batch" if scale > 1 else "")
        for part, scale in pairs
        if part.note
    ]
    return PartTiming(
        part=terminal_safe(name),
        column=terminal_safe(column),
        baseline=baseline,
        ms=ms,
        bytes_per_s=1e3 * moved / ms.value if repeated and moved and not baseline else None,
        notes=tuple(dict.fromkeys(notes)),
    )
