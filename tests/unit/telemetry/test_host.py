from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nfold.telemetry.host import (
    HostSnapshot,
    ProcessTimes,
    list_processes,
    processes_from_proc,
    processes_from_psutil,
    shared_memory_bytes,
    take_snapshot,
    total_disk_read_bytes,
)


def _process(parent: int, seconds: float = 1.0, reaped_s: float = 0.0) -> ProcessTimes:
    return ProcessTimes(parent, 1.0, seconds, reaped_s, rss_bytes=10)


def _seen(**found: ProcessTimes) -> HostSnapshot:
    table = {int(name.removeprefix("p")): process for name, process in found.items()}
    return HostSnapshot(0.0, 0.0, 0.0, 0.0, None, table)


SEEN = _seen(
    p1=_process(0),
    p10=_process(1),
    p20=_process(10, seconds=2.0, reaped_s=0.5),
    p21=_process(20, seconds=4.0),
    p22=_process(21, seconds=8.0),
    p30=_process(10, seconds=16.0),
)


def test_a_tree_is_a_process_with_all_its_descendants() -> None:
    assert SEEN.tree(20) == {20, 21, 22}
    assert SEEN.tree(10) == {10, 20, 21, 22, 30}
    assert SEEN.tree(99) == set()


def test_a_tree_s_time_holds_that_of_its_dead() -> None:
    assert SEEN.tree_seconds(20) == pytest.approx(14.5)
    assert SEEN.tree_rss_bytes(20) == 30
    assert SEEN.tree_rss_bytes(99) is None


def test_the_processes_between_two() -> None:
    assert SEEN.intermediate_processes(1, 22) == {21, 20, 10}
    assert SEEN.intermediate_processes(10, 20) == set()
    assert SEEN.intermediate_processes(30, 22) == set()
    assert SEEN.intermediate_processes(99, 22) == set()


def test_a_circle_of_parents_ends() -> None:
    circle = _seen(p5=_process(6), p6=_process(5))
    assert circle.intermediate_processes(1, 5) == set()
    assert circle.tree(5) == {5, 6}


def test_a_command_may_be_called_anything(tmp_path: Path) -> None:
    after_name = "S 7 1 1 0 -1 0 0 0 0 0 100 50 20 10 20 0 1 0 4242 9999 3 0"
    for name, command in {"8": "a) S 1 (b", "9": "x y"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "stat").write_text(f"{name} ({command}) {after_name}\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "10").mkdir()
    found = processes_from_proc(str(tmp_path))
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    expected = ProcessTimes(
        7, 4242.0, 150 * tick_s, 30 * tick_s, rss_bytes=3 * os.sysconf("SC_PAGE_SIZE")
    )
    assert found == {8: expected, 9: expected}


def test_proc_and_psutil_agree_on_this_process() -> None:
    mine, theirs = list_processes()[os.getpid()], processes_from_psutil()[os.getpid()]
    assert mine.parent == theirs.parent == os.getppid()
    assert mine.cpu_s == pytest.approx(theirs.cpu_s, abs=0.5)
    assert mine.rss_bytes == pytest.approx(theirs.rss_bytes, rel=0.2)


def test_a_child_is_in_the_tree_and_its_time_stays_when_it_is_gone() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = take_snapshot().tree_seconds(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = take_snapshot()
        assert child.pid in during.tree(os.getpid())
    after = take_snapshot()
    assert child.pid not in after.processes
    assert during.tree_seconds(os.getpid()) >= before + 0.25
    kept, had = after.tree_seconds(os.getpid()), during.tree_seconds(os.getpid())
    assert kept > had - 0.05  # Less than a tick of the kernel's (10 ms) a sum: both are added up.


def test_counters_only_grow() -> None:
    first, second = take_snapshot(), take_snapshot()
    assert second.at_s > first.at_s
    assert second.total_s >= first.total_s > 0
    assert first.total_s >= first.busy_s >= first.working_s > 0


def test_only_disks_with_a_device_of_their_own_are_counted() -> None:
    read = total_disk_read_bytes()
    assert read is None or read >= 0


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    assert shared_memory_bytes(tmp_path / "missing") is None
    assert (shared_memory_bytes(tmp_path) or 0) > 0
