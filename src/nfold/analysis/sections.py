"""Sections of a report: the stored measurements of one workload on one machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from nfold.analysis.cells import Cell, group_cells
from nfold.analysis.comparison import CellResult, compute_results
from nfold.core.errors import StoreUnusable, UnknownValue
from nfold.core.machine import Machine
from nfold.core.measurement import Measurement
from nfold.core.redaction import redact_variables
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
