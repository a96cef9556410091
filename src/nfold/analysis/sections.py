"""Sections of a report: the measurements of one workload on one machine, and their conclusion."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from nfold.analysis import cell_labels
from nfold.analysis.cells import Cell, group_cells
from nfold.analysis.comparison import (
    CellResult,
    Comparison,
    compute_results,
    strong_or_weak_comparisons,
)
from nfold.analysis.part_timings import PartTiming
from nfold.core.errors import StoreUnusable, UnknownValue
from nfold.core.format import (
    STATUS_LABELS,
    format_number,
    format_percent,
    format_range,
    format_ratio,
    join_words,
    pluralize,
    terminal_safe,
)
from nfold.core.machine import Machine
from nfold.core.measurement import Measurement
from nfold.core.redaction import redact_variables
from nfold.core.stats import Interval
from nfold.core.workload import Workload
from nfold.store.store import Store

TELEMETRY_FILE = "telemetry.csv"


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """All cells of one workload on one machine, in order of first measurement."""

    workload: str
    machine: Machine
    results: tuple[CellResult, ...]

    @property
    def cells(self) -> list[Cell]:
        return [result.cell for result in self.results]


@dataclass(frozen=True, kw_only=True)
class TelemetryRun:
    """A run whose telemetry is plotted, and its file."""

    measurement: Measurement
    csv: Path


def load_measurements(
    results_folder: Path, workload: str | None = None, only: Collection[str] | None = None
) -> list[Measurement]:
    """Return the measurements without interventions, oldest first; ``only`` selects cell ids.

    Raises StoreUnusable if the store is missing or empty, and UnknownValue for a workload without
    measurements.
    """
    with Store.open_readonly(results_folder) as store:
        measured = [m for m in store.measurements(workload) if not m.variant]
        known = measured or [m for m in store.measurements() if not m.variant]
    if not known:
        raise StoreUnusable(f"{store.path} holds no measurements; next: nfold bench digits")
    if not measured:
        raise UnknownValue("workload", workload, dict.fromkeys(str(m.workload) for m in known))
    return [m for m in measured if only is None or m.cell in only]


def group_sections(measurements: Sequence[Measurement]) -> list[ReportSection]:
    """Return one section per workload, code and machine, in order of first measurement."""
    grouped: dict[tuple[Workload, str], list[Measurement]] = {}
    for measurement in measurements:
        key = (measurement.workload, measurement.machine.id)
        grouped.setdefault(key, []).append(measurement)
    alike: dict[str, list[Workload]] = defaultdict(list)
    for workload, _ in grouped:
        if workload not in alike[str(workload)]:
            alike[str(workload)].append(workload)
    return [
        ReportSection(
            workload=_distinguish_workload(workload, alike[str(workload)]),
            machine=found[0].machine,
            results=tuple(compute_results(group_cells(found))),
        )
        for (workload, _), found in grouped.items()
    ]


def _distinguish_workload(workload: Workload, others: Sequence[Workload]) -> str:
    parts = [f"code {workload.code}"] if len({other.code for other in others}) > 1 else []
    if len({other.imports for other in others if other.code == workload.code}) > 1:
        parts.append(f"imports {workload.imports or 'unknown'}")
    shared = set.intersection(*(set(other.variables) for other in others))
    own = {name: value for name, value in workload.variables if (name, value) not in shared}
    parts += [f"{name}={value}" for name, value in redact_variables(own).items()]
    return f"{workload} ({', '.join(parts)})" if parts else str(workload)


def check_cell(sections: Sequence[ReportSection], cell: str) -> None:
    """Raise UnknownValue if no section has a cell or a measurement with this id."""
    known = [found for section in sections for found in section.cells]
    if not any(_has_id(found, cell) for found in known):
        raise UnknownValue("cell", cell, [found.first.cell for found in known])


def _has_id(cell: Cell, name: str) -> bool:
    return name == cell.first.cell or any(name == m.id for m in cell.measurements)


def find_telemetry_run(
    section: ReportSection, results_folder: Path, cell: str | None = None
) -> TelemetryRun | None:
    """Return the run to plot, None without telemetry.

    This is a run of the given cell, or else of the cell with the lowest speedup on the most devices.
    """

    def order(result: CellResult) -> tuple[bool, int, float]:
        compared = result.comparison
        return (result.succeeded, result.devices, -compared.speedup.value if compared else 0.0)

    ordered = sorted(section.results, key=order, reverse=True)
    chosen = [result for result in ordered if cell is not None and _has_id(result.cell, cell)]
    runs = (
        telemetry_run_of_cell(result.cell, results_folder, cell) for result in chosen or ordered
    )
    return next((run for run in runs if run is not None), None)


def telemetry_run_of_cell(
    cell: Cell, results_folder: Path, name: str | None = None
) -> TelemetryRun | None:
    """Return the run with telemetry: the one with id ``name``, or else the latest."""
    root = results_folder.resolve()
    for measurement in sorted(
        cell.measurements, key=lambda m: (m.id != name, m.status != "ok", -m.repeat)
    ):
        if measurement.folder is not None:
            csv = (root / measurement.folder / TELEMETRY_FILE).resolve()
            if csv.is_relative_to(root) and csv.is_file():
                return TelemetryRun(measurement=measurement, csv=csv)
    return None


END_TO_END_PREFIX = "end to end"  # names of the parts that measure host to host begin so


def headline_sentences(
    found: Sequence[CellResult], timings: Sequence[PartTiming] = ()
) -> list[str]:
    """Return the conclusions of one section, the most important first."""
    sentences = [_scaling(found) or _fastest(found), _peers(timings), _failures(found)]
    return [terminal_safe(sentence) for sentence in sentences if sentence]


def _scaling(found: Sequence[CellResult]) -> str:
    compared = strong_or_weak_comparisons(found)
    if not compared:
        return ""
    devices = max(r.devices for r in compared)
    most = [(r, r.comparison) for r in compared if r.devices == devices and r.comparison]
    best, first = max(most, key=lambda pair: pair[1].speedup.value)
    worst, last = min(most, key=lambda pair: pair[1].speedup.value)
    axes = cell_labels.varying_axes([best.cell, worst.cell]) if best is not worst else ()
    differing = dict.fromkeys(["batch", *(axis for axis in axes if axis != "devices")])
    sentence = f"{pluralize(devices, 'device')} are {_compared(first)}{_at(best, *differing)}"
    if worst is best or _overlap(first.speedup, last.speedup):
        return f"{sentence}."
    return f"{sentence}, and {format_ratio(last.speedup.value)}{_at(worst, *differing)}."


def _compared(comparison: Comparison) -> str:
    speedup, efficiency = comparison.speedup, format_percent(comparison.efficiency.value)
    weak = "at its share of the batch" if comparison.scaling == "weak" else ""
    caveats = "; ".join(c.text for c in comparison.caveats if c.kind != "weak_scaling")
    about = ", ".join(filter(None, [format_range(speedup, 2), f"{efficiency} efficiency", weak]))
    about = "; ".join(filter(None, [about, caveats]))
    verdict = "slower than one: " if (speedup.high or speedup.value) < 1 else ""
    return f"{verdict}{format_ratio(speedup.value)} as fast as one ({about})"


def _overlap(first: Interval, second: Interval) -> bool:
    if first.low is None or second.high is None:
        return first.value == second.value
    return first.low <= second.high


def _at(result: CellResult, *differing: str) -> str:
    return f" at {cell_labels.cell_label(result.cell.first, differing).replace(' · ', ', ')}"


def _fastest(found: Sequence[CellResult]) -> str:
    timed = [(r.samples_per_s, r) for r in found if r.samples_per_s is not None]
    if not timed:
        return "No measurement ran to its end."
    rate, best = max(timed, key=lambda pair: pair[0].value)
    place = cell_labels.cell_label(best.cell.first, ("devices", "batch")).replace(" · ", " at ")
    lead = "The fastest: " if len(timed) > 1 else ""
    return f"{lead}{format_number(rate.value)} images/s on {place}."


def _peers(timings: Sequence[PartTiming]) -> str:
    whole = [t for t in timings if t.part.startswith(END_TO_END_PREFIX) and not t.baseline]
    peers = [t for t in timings if t.baseline]
    if not whole or not peers:
        return ""
    best = min(whole, key=lambda t: t.ms.value)
    peer = min(peers, key=lambda t: t.ms.value)
    ratio = peer.ms.value / best.ms.value
    verdict = "as fast as" if ratio >= 1 else "slower than"
    times = format_number(max(ratio, 1 / ratio))
    return (
        f"{best.part[:1].upper()}{best.part[1:]} on {best.column}: "
        f"{format_number(best.ms.value)} ms, {times}× {verdict} {peer.part} "
        f"({format_number(peer.ms.value)} ms)."
    )


def _failures(found: Sequence[CellResult]) -> str:
    failed = Counter(
        STATUS_LABELS[r.cell.first_failed_or_first.status] for r in found if not r.succeeded
    )
    if not failed:
        return ""
    kinds = join_words([f"{many} {status}" for status, many in failed.items()])
    verb = "has" if failed.total() == 1 else "have"
    return f"{failed.total()} of {pluralize(len(found), 'cell')} {verb} no result: {kinds}."
