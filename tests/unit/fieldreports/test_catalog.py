"""The grids of the field reports on machines of every size, and what a user narrows of them."""

from __future__ import annotations

from typing import Any

import pytest

from made import machine
from nfold.bench.grid import Grid, build_grids
from nfold.core.errors import UnknownValue, UsageError
from nfold.core.machine import Machine
from nfold.core.plan import Plan
from nfold.fieldreports.catalog import (
    FIELD_REPORTS,
    ReportGrid,
    default_devices,
    find_report,
    select_axes,
)

TRAINED = ReportGrid(workload="mnist", axes={"framework": "torch", "batch": "100,200"}, epochs=4)
TIMED = ReportGrid(workload="conv2d", steps=30, max_devices=1)


def _grid(
    parts: tuple[ReportGrid, ...],
    host: Machine,
    devices: str | None = None,
    axis_values: dict[str, str] | None = None,
    **common: Any,
) -> Grid:
    devices = devices or default_devices(host)
    axes = select_axes(parts, devices, Plan(**common), axis_values or {})
    return build_grids(axes, host, lambda *_: None)


@pytest.mark.parametrize("gpus", [0, 1, 2, 4])
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", FIELD_REPORTS)
def test_every_report_is_a_grid_on_every_machine(name: str, quick: bool, gpus: int) -> None:
    parts = find_report(name).grids(quick=quick)
    host = machine(gpus=gpus, cores=16)
    grid = _grid(parts, host)
    assert grid.cells
    assert all(cell.plan.is_complete for cell in grid.cells)
    kind, most = ("cuda", gpus) if gpus else ("cpu", 2)
    assert {cell.plan.device for cell in grid.cells} == {kind}
    assert max(cell.plan.devices or 0 for cell in grid.cells) == most
    assert len({(str(cell.workload), cell.label) for cell in grid.cells}) == len(grid.cells)
    if quick and gpus == 0:
        assert len(grid.cells) <= 16


@pytest.mark.parametrize(
    ("gpus", "device", "expected"),
    [
        (0, None, "cpu:1,cpu:2"),
        (1, None, "1"),
        (3, None, "1,2"),
        (8, None, "1,2,4,8"),
        (8, "cpu", "cpu:1,cpu:2"),
    ],
)
def test_devices_are_powers_of_two_up_to_what_there_is(
    gpus: int, device: str | None, expected: str
) -> None:
    assert default_devices(machine(gpus=gpus, cores=16), device) == expected


def test_one_core_is_one_device() -> None:
    assert default_devices(machine(cores=1)) == "cpu:1"


def test_a_batch_per_device_makes_as_many_steps_on_any_number_of_devices() -> None:
    weak = ReportGrid(
        workload="mnist",
        axes={"batch": "100"},
        scaling="weak",
        epochs=5,
        epochs_per_device=True,
        min_devices=2,
    )
    grid = _grid((weak,), machine(gpus=4, cores=16))
    found = [(cell.plan.devices, cell.plan.batch, cell.plan.epochs) for cell in grid.cells]
    assert found == [(2, 200, 10), (4, 400, 20)]


def test_the_share_of_the_cores_is_the_same_in_all_grids_of_a_report() -> None:
    grid = _grid((TRAINED, TIMED), machine(cores=16))
    assert {cell.plan.cores_per_device for cell in grid.cells} == {8}
    assert {cell.plan.devices for cell in grid.cells if cell.workload.name == "conv2d"} == {1}


def test_a_user_narrows_values_and_gives_other_lengths() -> None:
    grid = _grid((TRAINED,), machine(), axis_values={"batch": "200"}, epochs=1, devices="cpu:1")
    (cell,) = grid.cells
    assert (cell.plan.batch, cell.plan.epochs, cell.plan.devices) == (200, 1, 1)
    both = _grid((TRAINED, TIMED), machine(), axis_values={"batch": "100"}, epochs=1)
    assert {cell.workload.name for cell in both.cells} == {"mnist", "conv2d"}
    assert {cell.plan.steps for cell in both.cells} == {None, 30}


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"axis_values": {"layout": "channels_last"}}, "no axis 'layout'"),
        ({"axis_values": {"batch": "64"}}, "nothing of this report is left with --batch 64"),
        ({"steps": 10}, "has a length in steps"),
    ],
)
def test_what_leaves_nothing_is_refused(chosen: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        _grid((TRAINED,), machine(), **chosen)


def test_an_unknown_value_is_refused_as_a_users_is() -> None:
    with pytest.raises(UnknownValue, match="theano"):
        _grid((ReportGrid(workload="mnist", axes={"framework": "theano"}),), machine())
    with pytest.raises(UnknownValue, match="int3"):
        _grid((TRAINED,), machine(), axis_values={"framework": "int3"})
    with pytest.raises(UnknownValue, match="mirrored-mnist"):
        find_report("mirrored")


def test_other_frameworks_convolve_in_the_full_grid_only() -> None:
    host = machine(cores=16)
    known = {
        quick: _grid(find_report("conv2d-devices").grids(quick=quick), host)
        for quick in (False, True)
    }
    frameworks = {q: {cell.plan.framework for cell in grid.cells} for q, grid in known.items()}
    assert frameworks == {False: {"torch", "tensorflow", "jax"}, True: {"torch"}}
    assert len([c for c in known[False].cells if c.plan.framework != "torch"]) == 4
