"""What a report is about: the store's measurements, in one section per workload and machine."""

from __future__ import annotations

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
    """All cells of one workload on one machine, with their numbers."""

    workload: str
    machine: Machine
    results: tuple[CellResult, ...]

    @property
    def cells(self) -> list[Cell]:
        """The cells, in order of first measurement."""
        return [result.cell for result in self.results]


@dataclass(frozen=True, kw_only=True)
class TelemetryRun:
    """The one run whose telemetry is drawn, and its file."""

    measurement: Measurement
    csv: Path


def load_measurements(
    results_folder: Path, workload: str | None = None, only: Collection[str] | None = None
) -> list[Measurement]:
    """The measurements to report, oldest first; at least one. ``only`` keeps some cells, by id.

    Raises StoreUnusable where there is no store or nothing in it, and UnknownValue with the
    workloads that were measured.
    """
    with Store.open_readonly(results_folder) as store:
        measured = _plans(store.measurements(workload))
        known = measured or _plans(store.measurements())
    if not known:
        raise StoreUnusable(f"{store.path} holds no measurements; next: nfold bench digits")
    if not measured:
        raise UnknownValue("workload", workload, dict.fromkeys(str(m.workload) for m in known))
    return [m for m in measured if only is None or m.cell in only]


def _plans(measurements: Sequence[Measurement]) -> list[Measurement]:
    return [measurement for measurement in measurements if not measurement.variant]


def group_sections(measurements: Sequence[Measurement]) -> list[ReportSection]:
    """One section per workload, its code and machine, in order of first measurement."""
    grouped: dict[tuple[Workload, str], list[Measurement]] = {}
    for measurement in measurements:
        key = (measurement.workload, measurement.machine.id)
        grouped.setdefault(key, []).append(measurement)
    names = _names([workload for workload, _ in grouped])
    return [
        ReportSection(
            workload=names[workload],
            machine=found[0].machine,
            results=tuple(compute_results(group_cells(found))),
        )
        for (workload, _), found in grouped.items()
    ]


def _names(workloads: Sequence[Workload]) -> dict[Workload, str]:
    alike: dict[str, list[Workload]] = {}
    for one in workloads:
        alike.setdefault(str(one), []).append(one)
    return {one: _distinguish_workload(one, alike[str(one)]) for one in workloads}


def _distinguish_workload(workload: Workload, others: Sequence[Workload]) -> str:
    said = [f"code {workload.code}"] if len({one.code for one in others}) > 1 else []
    if len({one.imports for one in others if one.code == workload.code}) > 1:
        said.append(f"imports {workload.imports or 'unknown'}")
    shared = set.intersection(*(set(one.variables) for one in others))
    own = {name: value for name, value in workload.variables if (name, value) not in shared}
    said += [f"{name}={value}" for name, value in redact_variables(own).items()]
    return f"{workload} ({', '.join(said)})" if said else str(workload)


def check_cell(sections: Sequence[ReportSection], cell: str) -> None:
    """Raise UnknownValue where no section has a cell or a measurement of this id."""
    known = [result.cell for section in sections for result in section.results]
    if not any(_is(one, cell) for one in known):
        raise UnknownValue("cell", cell, [one.first.cell for one in known])


def _is(cell: Cell, name: str) -> bool:
    return name == cell.first.cell or any(name == m.id for m in cell.measurements)


def find_telemetry_run(
    section: ReportSection, results_folder: Path, cell: str | None = None
) -> TelemetryRun | None:
    """The run whose telemetry is drawn, None where none was kept.

    The named cell; else, of those on the most devices, the one that scales worst.
    """
    ordered = sorted(section.results, key=_interest, reverse=True)
    chosen = [r for r in ordered if cell is not None and _is(r.cell, cell)]
    found = (
        telemetry_run_of_cell(result.cell, results_folder, cell) for result in chosen or ordered
    )
    return next((one for one in found if one is not None), None)


def telemetry_run_of_cell(
    cell: Cell, results_folder: Path, name: str | None = None
) -> TelemetryRun | None:
    """The run of a cell whose telemetry is drawn: the one of this very id, else the latest."""
    for measurement in _latest_first(cell, name):
        csv = _telemetry(measurement, results_folder)
        if csv is not None:
            return TelemetryRun(measurement=measurement, csv=csv)
    return None


def _interest(result: CellResult) -> tuple[bool, int, float]:
    compared = result.comparison
    return (result.succeeded, result.devices, -compared.speedup.value if compared else 0.0)


def _latest_first(cell: Cell, name: str | None) -> list[Measurement]:
    return sorted(cell.measurements, key=lambda m: (m.id != name, m.status != "ok", -m.repeat))


def _telemetry(measurement: Measurement, results_folder: Path) -> Path | None:
    if measurement.folder is None:
        return None
    root = results_folder.resolve()
    csv = (root / measurement.folder / TELEMETRY_FILE).resolve()
    return csv if csv.is_relative_to(root) and csv.is_file() else None
