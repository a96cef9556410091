from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nfold.core.errors import UsageError
from nfold.telemetry import telemetry_csv
from nfold.telemetry.nvml import Nvml
from nfold.telemetry.sampler import (
    GpuSampler,
    SignalWaiter,
    TelemetrySampler,
    next_deadline,
    read_rank_pids,
    start_sampler,
)
from nfold.telemetry.telemetry_csv import read_rows
from nvml_fake import FakeCard, FakeNvml


def _sampler(tmp_path: Path, api: FakeNvml, gpus: int) -> TelemetrySampler:
    watched = GpuSampler(range(gpus), Nvml(api).cards(), pcie_budget_s=1.0)
    return TelemetrySampler(
        tmp_path / "t.csv", tmp_path / "ranks.json", watched, parent=os.getppid()
    )


def test_columns_of_two_gpus_and_a_rank_that_appears_late(tmp_path: Path) -> None:
    sampler = _sampler(tmp_path, FakeNvml([FakeCard(0), FakeCard(1)]), gpus=2)
    sampler.sample()
    (tmp_path / "ranks.json").write_text(json.dumps({"0": os.getpid()}))
    sampler.sample()
    sampler.close()
    text = (tmp_path / "t.csv").read_text()
    assert text.splitlines()[0].split(",") == telemetry_csv.column_names([0, 1], [0])
    first, second = read_rows(tmp_path / "t.csv")
    assert first["rank0_rss_bytes"] is None
    assert first["host_cpu_percent"] is None, "the first row has nothing to compare with"
    assert (second["rank0_rss_bytes"] or 0) > 2**20
    assert (first["gpu0_power_w"], second["gpu1_utilisation_percent"]) == (300.0, 91.0)
    assert second["gpu1_pcie_tx_bytes_per_s"] == 1e6
    assert (first["monotonic_s"] or 0) < (second["monotonic_s"] or 0)


def test_rows_carry_the_monotonic_clock_that_windows_use(tmp_path: Path) -> None:
    sampler = _sampler(tmp_path, FakeNvml([]), gpus=0)
    begin = time.monotonic()
    sampler.sample()
    end = time.monotonic()
    sampler.close()
    (row,) = read_rows(tmp_path / "t.csv")
    assert begin - 1e-3 <= (row["monotonic_s"] or 0) <= end + 1e-3


def test_a_value_that_a_device_refuses_is_an_empty_cell(tmp_path: Path) -> None:
    api = FakeNvml([FakeCard(0), FakeCard(1, refuses={"PowerUsage"})])
    sampler = _sampler(tmp_path, api, gpus=2)
    sampler.sample()
    sampler.close()
    (row,) = read_rows(tmp_path / "t.csv")
    assert row["gpu0_power_w"] == 300.0
    assert row["gpu1_power_w"] is None
    assert row["gpu1_temperature_c"] == 50


def test_nvml_lost_in_mid_run_leaves_empty_cells_from_then_on(tmp_path: Path) -> None:
    sampler = _sampler(tmp_path, FakeNvml([FakeCard(0)], lost_after=25), gpus=1)
    for _ in range(6):
        sampler.sample()
    sampler.close()
    powers = [row["gpu0_power_w"] for row in read_rows(tmp_path / "t.csv")]
    assert powers[0] == 300.0
    assert powers[-1] is None
    assert powers == sorted(powers, key=lambda power: power is None)


def test_no_nvml_leaves_the_columns_there_and_empty(tmp_path: Path) -> None:
    sampler = _sampler(tmp_path, FakeNvml([], absent="Driver Not Loaded"), gpus=1)
    sampler.sample()
    sampler.close()
    (row,) = read_rows(tmp_path / "t.csv")
    assert {row[telemetry_csv.gpu_column(0, what)] for what in telemetry_csv.GPU_COLUMNS} == {None}


def test_ranks_that_are_gone_leave_empty_cells(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    (tmp_path / "ranks.json").write_text(json.dumps({"0": os.getpid(), "1": ended.pid}))
    sampler = _sampler(tmp_path, FakeNvml([]), gpus=0)
    sampler.sample()
    (tmp_path / "ranks.json").write_text(json.dumps({"1": os.getpid()}))
    sampler.sample()
    sampler.close()
    first, second = read_rows(tmp_path / "t.csv")
    assert [first["rank0_rss_bytes"] is None, first["rank1_rss_bytes"] is None] == [False, True]
    assert [second["rank0_rss_bytes"] is None, second["rank1_rss_bytes"] is None] == [True, False]


def test_ranks_are_none_until_the_file_is_there(tmp_path: Path) -> None:
    assert read_rank_pids(tmp_path / "missing.json") == {}


@pytest.mark.parametrize(
    ("now_s", "deadline_s"), [(10.0, 10.5), (10.3, 10.5), (10.5, 11.0), (13.7, 14.0)]
)
def test_deadlines_are_multiples_of_the_interval_from_the_start(
    now_s: float, deadline_s: float
) -> None:
    assert next_deadline(10.0, 0.5, now_s) == pytest.approx(deadline_s)


def test_deadlines_do_not_drift() -> None:
    at_s = 100.0
    for _ in range(10_000):
        at_s = next_deadline(100.0, 0.1, at_s + 0.003)
    assert at_s == pytest.approx(1100.0)


def test_a_signal_before_the_wait_is_not_lost() -> None:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        ending = SignalWaiter()
        assert not ending.wait(0)
        signal.raise_signal(signal.SIGTERM)
        assert ending.wait(60)
    finally:
        signal.set_wakeup_fd(-1)
        for signum, handler in before.items():
            signal.signal(signum, handler)


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan")])
def test_an_impossible_interval_is_refused(tmp_path: Path, interval_s: float) -> None:
    with pytest.raises(UsageError, match="above 0"):
        start_sampler(tmp_path / "t.csv", tmp_path / "r.json", (), interval_s)


def test_the_sampler_imports_neither_torch_nor_rich_nor_numpy() -> None:
    requested = "import sys, nfold.telemetry.sampler; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", requested], capture_output=True, text=True, check=True
    )
    assert "psutil" in done.stdout.split()
    assert not {"torch", "rich", "typer", "numpy"} & set(done.stdout.split())
