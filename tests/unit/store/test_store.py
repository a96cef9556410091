from __future__ import annotations

from pathlib import Path

import pytest

import measured
from nfold.core.errors import StoreUnusable
from nfold.core.measurement import FailureCause
from nfold.store.store import DATABASE_FILE, Store


def test_appended_measurements_are_read_back_equal(tmp_path: Path) -> None:
    made = measured.measurement(devices=2, energy_joules=12.5, folder="measurements/x")
    with Store.open(tmp_path) as store:
        store.append(made)
    with Store.open(tmp_path) as store:
        assert store.measurements() == [made]


def test_measurements_come_oldest_first_and_the_latest_of_a_repeat_only(tmp_path: Path) -> None:
    first = measured.measurement(name="first", status="killed", cause=FailureCause(text="gone"))
    other = measured.measurement(name="other", repeat=1)
    again = measured.measurement(name="again")
    with Store.open(tmp_path) as store:
        for made in (first, other, again):
            store.append(made)
        assert [m.id for m in store.measurements()] == ["other", "again"]
        found = store.find(first.cell, 0)
    assert found == again


def test_find_returns_none_for_unknown_cells(tmp_path: Path) -> None:
    made = measured.measurement()
    with Store.open(tmp_path) as store:
        store.append(made)
        assert store.find(made.cell, 1) is None
        assert store.find("0123456789", 0) is None


def test_a_workload_is_selected_by_name_or_written_form(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        for workload in ("cnn10", "conv2d", "conv2d:size=50"):
            store.append(measured.measurement(workload=workload))
        assert [str(m.workload) for m in store.measurements("conv2d")] == [
            "conv2d",
            "conv2d:size=50",
        ]
        assert len(store.measurements("conv2d:size=50")) == 1
        assert store.measurements("conv") == []


def test_machines_are_kept_once_and_each_measurement_gets_its_own(tmp_path: Path) -> None:
    made = [
        measured.measurement(measured.gpu_machine(4), batch=128),
        measured.measurement(measured.gpu_machine(4), batch=256),
        measured.measurement(measured.gpu_machine(2), batch=128, devices=2),
    ]
    with Store.open(tmp_path) as store:
        for one in made:
            store.append(one)
        assert store.measurements() == made
        count = store._connection.execute("SELECT COUNT(*) FROM machine").fetchone()[0]
    assert count == 2


def test_an_id_is_stored_once_and_a_refused_one_leaves_nothing(tmp_path: Path) -> None:
    made = measured.measurement(name="twice")
    with Store.open(tmp_path) as store:
        store.append(made)
        with pytest.raises(StoreUnusable, match=r"measurement\.id"):
            store.append(measured.measurement(measured.cpu_machine(), name="twice"))
        assert store.measurements() == [made]
        assert store._connection.execute("SELECT COUNT(*) FROM machine").fetchone()[0] == 1


def test_hostile_text_is_only_text(tmp_path: Path) -> None:
    text = "'; DROP TABLE measurement; -- </script>\x1b[31m\n../\x00"
    made = measured.measurement(status="crashed", cause=FailureCause(text=text), folder=text)
    with Store.open(tmp_path) as store:
        store.append(made)
        assert store.measurements(text) == []
        assert store.measurements() == [made]


def test_a_row_of_another_form_names_itself(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.append(measured.measurement(name="strange"))
        store._connection.execute("UPDATE measurement SET document = '{\"colour\": 1}'")
        with pytest.raises(StoreUnusable, match=r"'strange' cannot be read.*colour"):
            store.measurements()


def test_a_plan_with_a_value_of_a_newer_nfold_names_its_row(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.append(measured.measurement(name="strange"))
        store._connection.execute(
            "UPDATE measurement SET document = replace(document, 'channels_first', 'spiral')"
        )
        with pytest.raises(StoreUnusable, match=r"'strange' cannot be read.*spiral"):
            store.measurements()


def test_a_store_that_is_only_read_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match=r"does not exist.*next: nfold bench"):
        Store.open_readonly(tmp_path)
    assert not (tmp_path / DATABASE_FILE).exists()


def test_readers_see_appends_of_an_open_writer(tmp_path: Path) -> None:
    made = measured.measurement()
    with Store.open(tmp_path) as writer, Store.open_readonly(tmp_path) as reader:
        writer.append(made)
        assert reader.measurements() == [made]
        with pytest.raises(StoreUnusable, match="cannot be written"):
            reader.append(measured.measurement(name="second"))
