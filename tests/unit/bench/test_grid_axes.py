"""Comma lists as a user writes them."""

from __future__ import annotations

import pytest

from nfold.bench.grid import LIST_AXES, GridAxes, parse_axes
from nfold.core.errors import UnknownValue, UsageError
from nfold.core.plan import Plan


def _read(
    *parameters: str, device: str | None = None, scaling: str = "strong", **lists: str | None
) -> GridAxes:
    common = Plan(device=device)
    return parse_axes("digits", lists, common=common, parameters=parameters, scaling=scaling)


def test_lists_become_changes_of_the_plan_in_their_order() -> None:
    axes = _read(batch="512,128", strategy="ddp, dp", seed=None)
    assert axes.changes == {
        "batch": ({"batch": 512}, {"batch": 128}),
        "strategy": ({"strategy": "ddp"}, {"strategy": "dp"}),
    }
    assert axes.scaling == "strong"
    assert str(axes.workload) == "digits"


def test_an_entry_that_is_there_twice_counts_once() -> None:
    assert _read(batch="128,64,128").changes["batch"] == ({"batch": 128}, {"batch": 64})


def test_devices_may_name_their_kind() -> None:
    changes = _read(devices="1,cpu:2,cuda:4").changes["devices"]
    assert changes == (
        {"devices": 1},
        {"device": "cpu", "devices": 2},
        {"device": "cuda", "devices": 4},
    )
    assert _read(devices="cpu:2", device="cpu").changes["devices"] == changes[1:2]


@pytest.mark.parametrize("name", LIST_AXES)
@pytest.mark.parametrize("text", ["", "1,,2", ","])
def test_empty_entries_are_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError, match="empty entry"):
        _read(**{name: text})


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("batch", "0", "batch '0': allowed are whole numbers from 1"),
        ("batch", "12x", "batch '12x'"),
        ("batch", "1.5", "batch '1.5'"),
        ("batch", "-4", "batch '-4'"),
        ("workers", "²", "workers '²'"),
        ("devices", "0", "--devices 0:"),
        ("devices", "cpu:", "--devices cpu:"),
        ("devices", "cpu:0", "--devices cpu:0:"),
    ],
)
def test_wrong_numbers_are_refused_with_what_is_allowed(name: str, text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        _read(**{name: text})
    assert str(raised.value).startswith(said)
    assert raised.value.exit_code == 2


def test_zero_is_a_number_of_workers_and_a_seed() -> None:
    assert _read(workers="0").changes == {"workers": ({"workers": 0},)}
    assert _read(seed="0").changes == {"seed": ({"seed": 0},)}


@pytest.mark.parametrize(
    ("name", "text", "closest"),
    [
        ("precision", "fp32,bf61", "bf16"),
        ("layout", "channel_last", "channels_last"),
        ("strategy", "dddp", "ddp"),
        ("framework", "pytorch", "torch"),
    ],
)
def test_unknown_values_name_the_closest_first(name: str, text: str, closest: str) -> None:
    with pytest.raises(UnknownValue) as raised:
        _read(**{name: text})
    assert raised.value.allowed[0] == closest


def test_a_device_kind_against_the_device_option_is_refused() -> None:
    with pytest.raises(UsageError, match="--device cuda"):
        _read(devices="cpu:2", device="cuda")


def test_unknown_axes_and_scalings_are_refused() -> None:
    with pytest.raises(UnknownValue, match="batch"):
        _read(batches="1")
    with pytest.raises(UnknownValue, match="allowed are weak, strong"):
        _read(scaling="week")


def test_parameters_are_an_axis() -> None:
    assert _read("filter=3,5,10", "size=50").parameters == {"filter": (3, 5, 10), "size": (50,)}


@pytest.mark.parametrize(
    "parameters",
    [("filter",), ("=3",), ("filter=",), ("filter=a",), ("filter=3", "filter=5")],
)
def test_malformed_parameters_are_refused(parameters: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        _read(*parameters)
