"""The real sampler beside a process that burns CPU: its rows, its end, its parent's end."""

from __future__ import annotations

import csv as csv_format
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nfold.telemetry import evaluation, sampler, telemetry_csv
from nfold.telemetry.telemetry_csv import TelemetryRow, read_latest_row, read_rows

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
INTERVAL_S = 0.2
LIMIT_S = 60.0
BURN = "while True: pass"
TESTS = Path(__file__).resolve().parents[1]


class Run:
    """A folder with a sampler's files, and the processes that a test started."""

    def __init__(self, folder: Path) -> None:
        self.csv = folder / "telemetry.csv"
        self.ranks = folder / "ranks.json"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, gpus: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        return self._keep(sampler.start_sampler(self.csv, self.ranks, gpus, INTERVAL_S))

    def burn(self) -> subprocess.Popen[bytes]:
        return self._keep(subprocess.Popen([sys.executable, "-c", BURN]))

    def _keep(self, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        self.processes.append(process)
        return process

    def set_ranks(self, *processes: subprocess.Popen[bytes]) -> None:
        aside = self.ranks.with_suffix(".new")
        aside.write_text(json.dumps({rank: p.pid for rank, p in enumerate(processes)}))
        aside.rename(self.ranks)

    def wait_until(self, what: Callable[[list[TelemetryRow]], bool]) -> list[TelemetryRow]:
        while not what(found := read_rows(self.csv)):
            assert not [p for p in self.processes if p.poll() is not None], self.log()
            time.sleep(0.02)
        return found

    def stop(self, process: subprocess.Popen[bytes]) -> list[TelemetryRow]:
        process.terminate()
        assert process.wait(LIMIT_S) == 0, self.log()
        assert self.log() == ""
        return read_rows(self.csv)

    def log(self) -> str:
        return self.csv.with_suffix(".log").read_text()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def _several(
    column: str, least: float = -1.0, count: int = 3
) -> Callable[[list[TelemetryRow]], bool]:
    """Whether so many rows have more than ``least`` in a column."""
    return lambda found: sum((row.get(column) or -2.0) > least for row in found) >= count


def test_a_busy_rank_is_seen_and_the_last_row_is_whole(run: Run) -> None:
    process = run.start()
    run.wait_until(lambda found: len(found) >= 1)
    assert "rank0_cpu_percent" not in read_latest_row(run.csv), "no rank is known yet"
    rank = run.burn()
    run.set_ranks(rank)
    run.wait_until(_several("rank0_cpu_percent", least=20.0))
    before = len(read_rows(run.csv))
    found = run.stop(process)
    assert len(found) > before, "a last row is written at the end"
    with run.csv.open(newline="") as file:
        header = next(csv_format.reader(file))
    assert header == telemetry_csv.column_names((), [0])
    assert run.csv.read_text().endswith("\n")
    times = [row["monotonic_s"] or 0.0 for row in found]
    assert times == sorted(times)
    assert times[0] <= time.monotonic()
    assert max(row["rank0_rss_bytes"] or 0 for row in found) > 2**20
    assert all(0 <= (row["host_cpu_percent"] or 0) <= 100 for row in found)
    assert all(abs((row["utc"] or 0) - time.time()) < 3600 for row in found)
    assert evaluation.energy_joules(run.csv, times[0], times[-1]) is None


def test_a_rank_s_children_count_and_so_do_those_that_are_gone(run: Run) -> None:
    """The rank itself does nothing: it starts one short-lived burning child after the other."""
    child = "import time\nwhile time.process_time() < 0.1: pass"
    code = f"import subprocess, sys\nwhile True: subprocess.run([sys.executable, '-c', {child!r}])"
    run.start()
    run.set_ranks(run._keep(subprocess.Popen([sys.executable, "-c", code], start_new_session=True)))
    run.wait_until(_several("rank0_cpu_percent", least=20.0))


def test_another_process_is_other_load_and_a_rank_is_not(run: Run) -> None:
    """The same burning process, first a stranger's, then a rank."""
    process = run.start()
    stranger = run.burn()
    found = run.wait_until(_several("host_other_load_percent", least=40.0))
    start_s, end_s = found[0]["monotonic_s"], found[-1]["monotonic_s"]
    assert start_s is not None
    assert end_s is not None
    assert "busy_host" in [
        d.kind for d in evaluation.telemetry_caveats(run.csv, start_s, end_s, cores=2)
    ]
    run.set_ranks(stranger)
    run.wait_until(_several("rank0_cpu_percent", least=20.0, count=10))
    owned = [row for row in run.stop(process) if (row["rank0_cpu_percent"] or 0) > 20.0]
    busy = _mean(owned, "host_cpu_percent") * (os.cpu_count() or 1)
    told = _mean(owned, "rank0_cpu_percent") + _mean(owned, "host_other_load_percent")
    assert told == pytest.approx(busy, abs=25.0), "the rank's load is in one of the two, not both"


def _mean(found: list[TelemetryRow], column: str) -> float:
    return sum(row[column] or 0.0 for row in found) / len(found)


def test_it_ends_with_a_parent_that_is_killed(run: Run) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom nfold.telemetry import sampler\n"
        f"print(sampler.start_sampler(Path({str(run.csv)!r}), Path({str(run.ranks)!r}), (), 0.1).pid, "
        "flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    run.processes.append(parent)
    assert parent.stdout is not None
    orphan = psutil.Process(int(parent.stdout.readline()))
    run.wait_until(lambda found: len(found) >= 2)
    assert os.getsid(orphan.pid) == orphan.pid, "a session of its own: Ctrl-C does not reach it"
    os.kill(parent.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs([orphan], timeout=LIMIT_S)
    left = [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    assert not left
    assert len(read_rows(run.csv)) >= 2


def test_two_gpus_one_of_which_refuses_and_both_are_lost_in_mid_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A made-up driver in the sampler's own process, in place of NVIDIA's."""
    (tmp_path / "pynvml.py").write_text(
        "import nvml_fake\n"
        "cards = [nvml_fake.FakeCard(0), nvml_fake.FakeCard(1, refuses={'PowerUsage'})]\n"
        "fake = nvml_fake.FakeNvml(cards, lost_after=70)\n"
        "def __getattr__(name):\n    return getattr(fake, name)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{TESTS}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    process = run.start(gpus=(0, 1))
    run.wait_until(_several("gpu1_temperature_c", least=0.0))
    found = run.wait_until(lambda found: found[-1]["gpu0_power_w"] is None if found else False)
    found = run.stop(process)
    assert found[0]["gpu0_power_w"] == 300.0
    assert found[0]["gpu1_power_w"] is None
    assert found[-1]["gpu1_temperature_c"] is None
    start_s, end_s = found[0]["monotonic_s"], found[-1]["monotonic_s"]
    assert start_s is not None
    assert end_s is not None
    texts = [
        d.text
        for d in evaluation.telemetry_caveats(run.csv, start_s, end_s)
        if d.kind != "busy_host"
    ]
    assert [text.split(" in ")[0] for text in texts] == [
        "GPU 0 did not answer",
        "GPU 1 did not answer",
    ]
