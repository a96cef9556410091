from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import measured
import measured_grids
from nfold.analysis import sections
from nfold.core.errors import StoreUnusable, UnknownValue
from nfold.core.workload import Workload
from nfold.store.store import Store


def test_one_section_per_workload_and_machine(mixed: Path) -> None:
    found = sections.group_sections(sections.load_measurements(mixed))
    assert [(s.workload, bool(s.machine.gpus)) for s in found] == [
        ("conv2d", True),
        ("digits", False),
        ("mnist", False),
    ]
    assert [len(s.results) for s in found] == [3, 2, 2]


def test_an_own_workload_has_a_section_for_each_code() -> None:
    made = measured.measurement(workload="project:make")
    codes = [Workload(name="project:make", code=code) for code in ("aa", "bb")]
    found = [dataclasses.replace(made, workload=one) for one in codes]
    assert [s.workload for s in sections.group_sections(found[:1])] == ["project:make"]
    several = [s.workload for s in sections.group_sections([*found, *found])]
    assert several == ["project:make (code aa)", "project:make (code bb)"]


def test_other_imports_or_variables_have_a_section_that_names_them() -> None:
    made = measured.measurement(workload="project:make")
    shared = ("OMP_NUM_THREADS", "4")
    several = [
        Workload(name="project:make", code=code, imports=imports, variables=(*steer, shared))
        for code, imports, *steer in (
            ("aa", "11"),
            ("aa", ""),
            ("bb", "11"),
            ("bb", "11", ("NCCL_ALGO", "Ring")),
        )
    ]
    found = [dataclasses.replace(made, workload=one) for one in several]
    assert [s.workload for s in sections.group_sections(found[2:])] == [
        "project:make",
        "project:make (NCCL_ALGO=Ring)",
    ]
    assert [s.workload for s in sections.group_sections(found)] == [
        "project:make (code aa, imports 11)",
        "project:make (code aa, imports unknown)",
        "project:make (code bb)",
        "project:make (code bb, NCCL_ALGO=Ring)",
    ]


def test_one_workload_can_be_selected(mixed: Path) -> None:
    assert {str(m.workload) for m in sections.load_measurements(mixed, "digits")} == {"digits"}


def test_a_workload_that_was_not_measured_is_refused_with_the_closest_first(mixed: Path) -> None:
    with pytest.raises(UnknownValue, match="unknown workload 'digit': allowed are digits, "):
        sections.load_measurements(mixed, "digit")


def test_an_empty_store_is_refused_with_the_next_step(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    with pytest.raises(StoreUnusable, match="holds no measurements; next: nfold bench"):
        sections.load_measurements(tmp_path)


def test_the_run_that_is_drawn_is_the_worst_scaling_on_the_most_devices(training: Path) -> None:
    (section,) = sections.group_sections(sections.load_measurements(training))
    watched = sections.find_telemetry_run(section, training)
    assert watched is not None
    plan = watched.measurement.plan
    assert (plan.devices, plan.batch, plan.strategy) == (4, 128, "dp")


def test_a_cell_is_selected_by_its_id_or_a_measurements_id(training: Path) -> None:
    (section,) = sections.group_sections(sections.load_measurements(training))
    wanted = section.results[2].cell.first
    for name in (wanted.cell, wanted.id):
        sections.check_cell([section], name)
        watched = sections.find_telemetry_run(section, training, name)
        assert watched is not None
        assert watched.measurement == wanted
    with pytest.raises(UnknownValue, match="unknown cell 'nothing'"):
        sections.check_cell([section], "nothing")


def test_telemetry_outside_of_the_results_is_never_read(tmp_path: Path) -> None:
    results = tmp_path / "results"
    outside = tmp_path / "outside"
    outside.mkdir()
    made = measured.measurement(folder="measurements/x")
    (outside / "telemetry.csv").write_text(measured_grids.telemetry_csv(made))
    for folder in ("../outside", str(outside)):
        hostile = dataclasses.replace(made, folder=folder)
        (section,) = sections.group_sections([hostile])
        assert sections.find_telemetry_run(section, results) is None


def test_without_a_file_no_run_is_drawn(tmp_path: Path) -> None:
    (section,) = sections.group_sections([measured.measurement(folder="measurements/gone")])
    assert sections.find_telemetry_run(section, tmp_path) is None
