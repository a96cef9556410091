"""The product of the axes as complete plans, each cell once, impossible ones with a reason."""

from __future__ import annotations

import pytest

from made import machine
from nfold.bench.grid import Grid, build_grids, parse_axes
from nfold.core.errors import DevicesMissing, ExtraMissing, UnknownValue, UsageError
from nfold.core.machine import Machine
from nfold.core.plan import Plan
from nfold.core.workload import Workload


def _not_captured(workload: Workload, plan: Plan, host: Machine) -> str | None:
    return "captured is planted" if plan.step == "captured" else None


def _grid(
    *parameters: str,
    host: Machine | None = None,
    workload: str = "digits",
    scaling: str = "strong",
    common: Plan | None = None,
    **lists: str | None,
) -> Grid:
    axes = parse_axes(
        workload, lists, common=common or Plan(), parameters=parameters, scaling=scaling
    )
    return build_grids([axes], host or machine(gpus=4, cores=16), _not_captured)


def test_the_grid_is_the_product_in_the_order_of_the_axes() -> None:
    grid = _grid(devices="1,2", batch="128,512")
    found = [(cell.plan.devices, cell.plan.batch) for cell in grid.cells]
    assert found == [(1, 128), (1, 512), (2, 128), (2, 512)]
    assert all(cell.plan.is_complete for cell in grid.cells)
    assert grid.duplicates == 0


def test_no_axes_are_one_cell_that_is_called_by_its_workload() -> None:
    (cell,) = _grid().cells
    assert cell.label == "digits"
    assert cell.plan.devices == 4


def test_strategies_on_one_device_are_the_same_cell_and_are_counted() -> None:
    grid = _grid(devices="1,2", strategy="ddp,dp")
    assert [cell.label for cell in grid.cells] == ["1 device", "2 devices · ddp", "2 devices · dp"]
    assert grid.duplicates == 1
    assert len({cell.id for cell in grid.cells}) == 3


def test_labels_hold_what_varies_and_the_kind_where_it_is_mixed() -> None:
    grid = _grid(devices="2,cpu:2", batch="64", precision="fp32,bf16")
    assert [cell.label for cell in grid.cells] == [
        "2 cuda devices · fp32",
        "2 cuda devices · bf16",
        "2 cpu devices · fp32",
        "2 cpu devices · bf16",
    ]


def test_cpu_devices_have_the_same_share_of_the_cores_in_every_cell() -> None:
    grid = _grid(devices="1,2,5", host=machine(cores=16))
    assert [cell.plan.cores_per_device for cell in grid.cells] == [3, 3, 3]
    mixed = _grid(devices="cpu:1,cpu:4,cuda:2")
    assert [cell.plan.cores_per_device for cell in mixed.cells] == [4, 4, 8]


def test_weak_scaling_multiplies_the_batch_by_the_devices() -> None:
    said = _grid(devices="1,2,4", batch="100", scaling="weak")
    assert [cell.plan.batch for cell in said.cells] == [100, 200, 400]
    automatic = _grid(devices="1,4", scaling="weak")
    assert [cell.plan.batch for cell in automatic.cells] == [128, 512]


def test_what_the_framework_cannot_do_is_a_cell_with_its_reason() -> None:
    grid = _grid(step="eager,captured")
    assert [cell.unsupported_reason for cell in grid.cells] == [None, "captured is planted"]
    assert [cell.unsupported_reason for cell in _grid(step="captured").cells] == [
        "captured is planted"
    ]


def test_a_strategy_that_does_not_fit_its_devices_is_a_cell_with_a_reason() -> None:
    grid = _grid(devices="1,2", strategy="single,ddp", step="eager")
    reasons = {cell.label: cell.unsupported_reason for cell in grid.cells}
    assert reasons["1 device"] is None
    assert reasons["2 devices · ddp"] is None
    assert reasons["2 devices · single"] is not None
    assert "allowed are ddp, nfold, dp" in reasons["2 devices · single"]
    (impossible,) = [cell for cell in grid.cells if cell.unsupported_reason]
    assert impossible.plan.is_complete
    assert (impossible.plan.devices, impossible.plan.strategy) == (2, "single")


def test_where_no_combination_can_be_it_is_an_error() -> None:
    with pytest.raises(UsageError, match="strategy 'single' with 2 devices"):
        _grid(devices="2,4", strategy="single")


def test_more_devices_than_there_are_are_refused() -> None:
    with pytest.raises(DevicesMissing, match="8 cuda devices") as raised:
        _grid(devices="1,8")
    assert raised.value.exit_code == 4
    with pytest.raises(DevicesMissing, match="3 cpu devices"):
        _grid(devices="1,3", host=machine(cores=2))


def test_the_simulated_framework_has_as_many_devices_as_asked_for() -> None:
    grid = _grid(framework="simulated", devices="1,64", host=machine(cores=2))
    assert [cell.plan.devices for cell in grid.cells] == [1, 64]


def test_parameters_make_workloads_and_are_said_in_the_label() -> None:
    grid = _grid("filter=3,5", "size=50", workload="conv2d:channels=10", devices="1")
    assert [str(cell.workload) for cell in grid.cells] == [
        "conv2d:channels=10,filter=3,size=50",
        "conv2d:channels=10,filter=5,size=50",
    ]
    assert [cell.label for cell in grid.cells] == ["filter 3", "filter 5"]


def test_parameters_that_do_not_go_together_are_a_cell_with_a_reason() -> None:
    grid = _grid("filter=3,10", "size=5,50", workload="conv2d", devices="1")
    impossible = [str(cell.workload) for cell in grid.cells if cell.unsupported_reason]
    assert impossible == ["conv2d:filter=10,size=5"]


@pytest.mark.parametrize("parameter", ["filter=3,0", "filter=200,3", "filter=0"])
def test_a_value_that_is_never_possible_is_an_error(parameter: str) -> None:
    with pytest.raises(UsageError):
        _grid(parameter, workload="conv2d", devices="1")


def test_unknown_workloads_and_parameters_name_the_closest_first() -> None:
    with pytest.raises(UnknownValue) as raised:
        _grid(workload="digit")
    assert raised.value.allowed[0] == "digits"
    with pytest.raises(UnknownValue, match="allowed are filter"):
        _grid("fliter=3", workload="conv2d")


def test_a_length_holds_in_every_cell() -> None:
    grid = _grid(devices="1,2", common=Plan(steps=50, warmup_steps=5))
    lengths = {(cell.plan.steps, cell.plan.epochs, cell.plan.warmup_steps) for cell in grid.cells}
    assert lengths == {(50, None, 5)}


def test_the_grid_of_another_machine_has_other_ids() -> None:
    here, there = (_grid(devices="1", host=machine(gpus=1, cores=cores)) for cores in (4, 8))
    assert here.cells[0].id != there.cells[0].id


def _without_jax(_: Workload, plan: Plan, __: Machine) -> str | None:
    if plan.framework == "jax":
        raise ExtraMissing("jax", "jax")
    return None


def test_a_framework_that_is_not_installed_is_a_cell_beside_others_and_an_error_alone() -> None:
    def grid(frameworks: str) -> Grid:
        asked = parse_axes("digits", {"framework": frameworks}, common=Plan())
        return build_grids([asked], machine(), _without_jax)

    here, missing = grid("torch,jax").cells
    assert here.unsupported_reason is None
    assert str(missing.unsupported_reason).endswith("pip install 'nfold[jax]'")
    with pytest.raises(ExtraMissing, match="jax is not installed"):
        grid("jax")
