from __future__ import annotations

import measured
from nfold.analysis import cell_labels
from nfold.analysis.cells import Cell, group_cells
from nfold.core.measurement import Measurement


def cells_of(*made: Measurement) -> list[Cell]:
    return group_cells(made)


def test_device_dependent_fields_do_not_vary_by_themselves() -> None:
    found = cells_of(
        measured.measurement(devices=1, workers=8), measured.measurement(devices=2, workers=4)
    )
    assert cell_labels.varying_axes(found) == ("devices",)
    shared = dict(cell_labels.shared_values(found))
    assert shared["strategy"] == "ddp"
    assert shared["loader workers"] == "8 on 1 device, 4 on 2 devices"


def test_strategies_vary_where_several_devices_have_different_ones() -> None:
    ddp = measured.measurement(devices=2, strategy="ddp")
    same = measured.measurement(devices=2, strategy="dp")
    other = measured.measurement(devices=4, strategy="dp")
    assert "strategy" in cell_labels.varying_axes(cells_of(ddp, same))
    assert "strategy" in cell_labels.varying_axes(cells_of(ddp, other))


def test_resident_data_has_no_loader_whose_workers_differ() -> None:
    loader = measured.measurement(workers=8)
    resident = measured.measurement(input="resident", augment="device", workers=0, step="eager")
    assert cell_labels.varying_axes(cells_of(loader, resident)) == ("input", "augment")
    few = measured.measurement(workers=2)
    assert "workers" in cell_labels.varying_axes(cells_of(loader, few, resident))


def test_a_single_cell_is_labelled_by_devices_and_batch() -> None:
    assert cell_labels.varying_axes(cells_of(measured.measurement())) == ("devices", "batch")


def test_irrelevant_fields_are_not_shown() -> None:
    gpu = dict(cell_labels.shared_values(cells_of(measured.measurement(epochs=3))))
    cpu = dict(
        cell_labels.shared_values(cells_of(measured.measurement(measured.cpu_machine(), steps=5)))
    )
    assert "cores per device" not in gpu
    assert cpu["cores per device"] == "2"
    assert "loader workers" not in cpu
    assert ("epochs" in gpu, "steps" in gpu) == (True, False)
    assert ("epochs" in cpu, "steps" in cpu) == (False, True)


def test_numbers_are_labelled_with_their_field() -> None:
    made = measured.measurement(devices=2, batch=64, layout="channels_last")
    assert cell_labels.cell_label(made, ("devices", "strategy", "batch", "layout")) == (
        "2 devices · ddp · batch 64 · channels_last"
    )
    assert (
        cell_labels.cell_label(measured.measurement(devices=1), ("devices", "strategy"))
        == "1 device"
    )
