from __future__ import annotations

from pathlib import Path

import pytest

import measured
import measured_grids
from nfold.report import chart_data


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "telemetry.csv"
    path.write_text(text)
    return path


def test_a_gpu_machine_gives_a_panel_for_each_quantity(tmp_path: Path) -> None:
    made = measured.measurement(devices=2)
    panels = chart_data.read_panels(write(tmp_path, measured_grids.telemetry_csv(made)))
    assert [panel.spec.title for panel in panels] == [
        "GPU utilisation [%]",
        "GPU memory [GiB]",
        "GPU power [W]",
        "host CPU [%]",
    ]
    assert panels[0].lines == ["GPU 0", "GPU 1"]
    assert panels[0].rows[0]["x"] == 0
    assert max(row["y"] for row in panels[1].rows) == pytest.approx(22)


def test_a_machine_without_a_gpu_gives_the_host_and_its_ranks(tmp_path: Path) -> None:
    made = measured.measurement(measured.cpu_machine(), devices=2, cores_per_device=1)
    panels = chart_data.read_panels(write(tmp_path, measured_grids.telemetry_csv(made)))
    assert [panel.spec.title for panel in panels] == [
        "host CPU [%]",
        "CPU of each rank [% of a core]",
        "memory of each rank [GiB]",
    ]
    assert panels[1].lines == ["rank 0", "rank 1"]


def test_loads_are_the_devices_and_the_host_over_the_same_seconds(tmp_path: Path) -> None:
    made = measured.measurement(devices=2)
    found = chart_data.read_load_panels(write(tmp_path, measured_grids.telemetry_csv(made)))
    assert found is not None
    devices, host = found
    assert devices.lines == ["GPU 0", "GPU 1"]
    assert host.lines == ["host"]
    assert {row["x"] for row in devices.rows} == {row["x"] for row in host.rows}


def test_the_load_of_a_cpu_device_is_in_percent_of_its_own_cores(tmp_path: Path) -> None:
    text = "monotonic_s,utc,host_cpu_percent,rank0_cpu_percent\n5.0,x,80,300\n6.0,x,90,400\n"
    found = chart_data.read_load_panels(write(tmp_path, text), cores_per_device=4)
    assert found is not None
    assert [row["y"] for row in found[0].rows] == [75, 100]
    assert (
        chart_data.read_load_panels(write(tmp_path, "monotonic_s,utc,host_cpu_percent\n5.0,x,80\n"))
        is None
    )


def test_what_the_device_does_not_say_is_left_out(tmp_path: Path) -> None:
    text = (
        "monotonic_s,utc,host_cpu_percent,gpu0_utilisation_percent,gpu0_power_w\n"
        "5.0,x,,10,\n6.0,x,,nan,\n7.0,x,,30,[N/A]\n8.0,x\n"
    )
    (panel,) = chart_data.read_panels(write(tmp_path, text))
    assert [(row["x"], row["y"]) for row in panel.rows] == [(0, 10), (2, 30)]


def test_an_empty_file_gives_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert chart_data.read_panels(path) == []
    assert chart_data.timed_span(path, measured.measurement()) is None


def test_the_timed_span_is_where_windows_lie_in_the_telemetry(tmp_path: Path) -> None:
    made = measured.measurement(rate=1000.0)
    span = chart_data.timed_span(write(tmp_path, measured_grids.telemetry_csv(made)), made)
    assert span is not None
    windows = made.ranks[0].windows
    seconds = windows[-1].start_s + windows[-1].seconds - windows[0].start_s
    assert span[0] == pytest.approx(10)
    assert span[1] - span[0] == pytest.approx(seconds)


def test_thinning_keeps_the_mean_and_the_ends_of_time() -> None:
    points = [(float(k), float(k % 7)) for k in range(10_000)]
    thin = chart_data.thin_points(points, 100)
    assert len(thin) == 100
    assert sum(y for _, y in thin) / 100 == pytest.approx(sum(y for _, y in points) / 10_000)
    assert chart_data.thin_points(points[:50], 100) == points[:50]
