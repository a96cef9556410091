from __future__ import annotations

import pytest

from nfold.telemetry.nvml import Nvml, NvmlDevice, PcieLink
from nvml_fake import FakeCard, FakeNvml


def _cards(*cards: FakeCard, visible: str | None = None) -> tuple[NvmlDevice, ...]:
    return Nvml(FakeNvml(list(cards))).cards(visible)


def _uuids(visible: str | None) -> list[str | None]:
    cards = _cards(FakeCard(0), FakeCard(1), FakeCard(2), visible=visible)
    return [card.uuid for card in cards]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("1", [1]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
        ("GPU-22aa-bb, 0", [2, 0]),
        ("GPU-1", [1]),
        ("GPU-", []),
        ("MIG-77", [2]),
        ("MIG-88,0", []),
        ("nonsense", []),
    ],
)
def test_visible_devices_in_cuda_s_order(visible: str | None, indices: list[int]) -> None:
    assert _uuids(visible) == [f"GPU-{i}{i}aa-bb" for i in indices]


def test_a_reading_has_the_units_of_its_columns() -> None:
    (card,) = _cards(FakeCard(0, reasons=4))
    assert card.read_counters() == {
        "utilisation_percent": 90,
        "memory_used_bytes": 2**30,
        "power_w": pytest.approx(300),
        "temperature_c": 50,
        "sm_clock_mhz": 1980,
        "throttle_reasons": 4,
        "energy_j": pytest.approx(1050),
    }
    assert card.pcie_traffic() == {"pcie_rx_bytes_per_s": 2e6, "pcie_tx_bytes_per_s": 1e6}
    assert card.pcie_link() == PcieLink(
        generation=1, width=16, system_generation=4, card_generation=4, max_width=16
    )
    assert str(card.pcie_link()) == "gen1 x16"


def test_refused_queries_are_none() -> None:
    (card,) = _cards(FakeCard(0, refuses={"PowerUsage", "UtilizationRates", "CurrPcieLinkWidth"}))
    reading = card.read_counters()
    assert reading["power_w"] is None
    assert reading["utilisation_percent"] is None
    assert reading["temperature_c"] == 50
    assert str(card.pcie_link()) == ""


def test_an_older_driver_has_throttle_reasons_under_an_older_name() -> None:
    (card,) = _cards(FakeCard(0, reasons=0x20, refuses={"CurrentClocksEventReasons"}))
    assert card.read_counters()["throttle_reasons"] == 0x22


def test_a_lost_device_answers_nothing_and_raises_nothing() -> None:
    api = FakeNvml([FakeCard(0)], lost_after=0)
    (card,) = Nvml(api).cards()
    assert set(card.read_counters().values()) == {None}
    assert set(card.pcie_traffic().values()) == {None}
    assert card.compute_pids() is None
    assert card.name is None
    assert card.bus_id is None
    assert card.nvlink_peers == ()
    assert not card.has_mig_instances()


def test_without_a_driver_there_is_a_reason_and_no_card() -> None:
    with Nvml(FakeNvml([FakeCard(0)], absent="Driver Not Loaded")) as nvml:
        assert nvml.error == "Driver Not Loaded"
        assert nvml.cards() == ()
        assert nvml.driver_version() is None


def test_it_is_closed_at_the_end() -> None:
    api = FakeNvml([])
    with Nvml(api) as nvml:
        assert api.open
        assert nvml.driver_version() == "600.1"
    assert not api.open
    assert nvml.cards() == ()


def test_another_error_than_nvml_s_is_not_hidden() -> None:
    with pytest.raises(AttributeError):
        Nvml(FakeNvml([])).query("nvmlDeviceGetNothingOfTheSort")


def test_every_call_exists_in_the_real_library() -> None:
    import inspect
    import re

    import pynvml

    from nfold.telemetry import nvml

    called = set(re.findall(r'"(nvml[A-Z]\w+)"', inspect.getsource(nvml)))
    assert len(called) > 20
    assert {name for name in called if not hasattr(pynvml, name)} == set()
