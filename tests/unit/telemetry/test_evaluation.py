from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from nfold.core.measurement import Caveat
from nfold.telemetry import telemetry_csv
from nfold.telemetry.evaluation import energy_joules, telemetry_caveats
from nfold.telemetry.telemetry_csv import TelemetryTable

GOOD: dict[str, float] = {
    "utilisation_percent": 99,
    "memory_used_bytes": 10,
    "power_w": 200.0,
    "temperature_c": 60,
    "sm_clock_mhz": 1900,
    "throttle_reasons": 0,
    "other_processes": 0,
}
LOST = dict.fromkeys(GOOD)


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    return tmp_path / "telemetry.csv"


def _write(
    csv: Path,
    gpus: list[list[dict[str, float | None]]],
    other_load: Sequence[float | None] | None = None,
    seconds: int = 6,
) -> None:
    """Rows at 0, 1, ... seconds; per row, the cells of each GPU over GOOD ones."""
    count = len(gpus[0]) if gpus else 0
    table = TelemetryTable(csv, telemetry_csv.column_names(range(count), ()))
    for t in range(seconds):
        row: dict[str, float | None] = {"monotonic_s": t}
        row["host_other_load_percent"] = other_load[t] if other_load else 3.0
        for gpu in range(count):
            cells = {**GOOD, **gpus[min(t, len(gpus) - 1)][gpu]}
            row.update(
                {telemetry_csv.gpu_column(gpu, what): value for what, value in cells.items()}
            )
        table.append(row)
    table.close()


def _caveats(csv: Path, start_s: float = 1.0, end_s: float = 5.0, cores: int = 2) -> list[Caveat]:
    return telemetry_caveats(csv, start_s, end_s, cores=cores)


def _kinds(csv: Path, **span: float) -> list[str]:
    return [caveat.kind for caveat in _caveats(csv, **span)]  # type: ignore[arg-type]  # floats all


def test_damaged_rows_are_a_caveat(csv: Path) -> None:
    _write(csv, [[{}]])
    with csv.open("ab") as file:
        file.write(b"6.0,\xff\n")
    assert _kinds(csv) == ["telemetry_missing"]
    assert energy_joules(csv, 1.0, 5.0) == 800.0


def test_a_quiet_run_has_no_caveats(csv: Path) -> None:
    _write(csv, [[{}, {"throttle_reasons": 0x1 | 0x2 | 0x10}]])
    assert _caveats(csv) == []


@pytest.mark.parametrize(
    ("bit", "kind"),
    [
        (0x04, "power_capped"),
        (0x08, "throttled"),
        (0x20, "throttled"),
        (0x40, "throttled"),
        (0x80, "throttled"),
    ],
)
def test_throttling_and_the_power_limit_are_kinds_of_their_own(
    csv: Path, bit: int, kind: str
) -> None:
    _write(csv, [[{}, {}], [{}, {}], [{}, {"throttle_reasons": bit}], [{}, {}]])
    (caveat,) = _caveats(csv)
    assert caveat.kind == kind
    assert "GPU 1" in caveat.text
    assert "1 of 4 rows" in caveat.text


def test_events_outside_of_the_span_are_no_caveats(csv: Path) -> None:
    hot: dict[str, float | None] = {"throttle_reasons": 0x40, "other_processes": 3}
    _write(csv, [[hot], [hot], [{}], [{}], [hot], [hot]], other_load=[500.0] * 2 + [0.0] * 4)
    assert _kinds(csv, start_s=1.0, end_s=3.0) == []
    assert _kinds(csv, start_s=0.5, end_s=3.0) == ["throttled", "busy_device", "busy_host"]


def test_another_process_on_the_card(csv: Path) -> None:
    _write(csv, [[{"other_processes": 2}], [{"other_processes": 1}]])
    (caveat,) = _caveats(csv)
    assert caveat == Caveat(kind="busy_device", text="another process was on GPU 0 in 4 of 4 rows")


@pytest.mark.parametrize(
    ("load", "cores", "busy"),
    [
        (8.0, 2, False),
        (45.0, 2, True),
        (100.0, 2, True),
        (100.0, 64, False),
        (300.0, 64, True),
    ],
)
def test_other_load_counts_where_it_can_hurt(
    csv: Path, load: float, cores: int, busy: bool
) -> None:
    _write(csv, [], other_load=[load] * 6)
    kinds = [caveat.kind for caveat in _caveats(csv, cores=cores)]
    assert kinds == (["busy_host"] if busy else [])


def test_other_load_is_a_mean_over_the_time_and_not_over_the_rows(csv: Path) -> None:
    _write(csv, [], other_load=[0.0, 0.0, 100.0, 0.0, 0.0, 0.0])
    assert _kinds(csv, start_s=1.9, end_s=4.9) == []
    assert _kinds(csv, start_s=1.1, end_s=2.1) == ["busy_host"]


def test_a_file_without_rows_or_no_file(csv: Path) -> None:
    assert _kinds(csv) == ["telemetry_missing"]
    _write(csv, [[{}]], seconds=1)
    assert _kinds(csv) == ["telemetry_missing"]
    assert energy_joules(csv, 0, 1) is None


def test_a_sampler_that_ended_too_early(csv: Path) -> None:
    _write(csv, [[{}]])
    assert _kinds(csv, start_s=1, end_s=7) == []
    (caveat,) = _caveats(csv, 1, 60)
    assert caveat.kind == "telemetry_missing"
    assert "55 s before" in caveat.text


def test_no_nvml_at_all(csv: Path) -> None:
    _write(csv, [[LOST, LOST]])
    assert _kinds(csv) == ["telemetry_missing", "telemetry_missing"]
    assert energy_joules(csv, 1, 5) is None


def test_nvml_lost_in_mid_run(csv: Path) -> None:
    _write(csv, [[{}], [{}], [{}], [LOST]])
    (caveat,) = _caveats(csv)
    assert caveat == Caveat(kind="telemetry_missing", text="GPU 0 did not answer in 3 of 4 rows")


def test_a_device_that_lacks_values(csv: Path) -> None:
    _write(csv, [[{"throttle_reasons": None, "other_processes": None, "power_w": None}]])
    (caveat,) = _caveats(csv)
    assert caveat.text.endswith("gpu0_power_w, gpu0_throttle_reasons")


def test_a_host_whose_load_is_unknown(csv: Path) -> None:
    _write(csv, [], other_load=[None] * 6)
    assert _kinds(csv) == ["telemetry_missing"]


def test_energy_is_the_sum_over_reporting_devices(csv: Path) -> None:
    _write(csv, [[{}, {"power_w": 100.0}, LOST]])
    assert energy_joules(csv, 1, 5) == pytest.approx(4 * 300)


def test_no_device_no_energy(csv: Path) -> None:
    _write(csv, [])
    assert energy_joules(csv, 1, 5) is None
