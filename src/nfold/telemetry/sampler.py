"""The GPUs' cells of one row."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from nfold.core.errors import UsageError
from nfold.core.parent_death import child_environment, die_with_parent
from nfold.telemetry import telemetry_csv
from nfold.telemetry.host import HostSnapshot, SnapshotInterval, take_snapshot
from nfold.telemetry.nvml import VISIBLE_VARIABLE, Nvml, NvmlDevice
from nfold.telemetry.telemetry_csv import CellValue, TelemetryTable

_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of the kernel: the namespace in which NVML's process ids are true."""


class GpuSampler:
    """Some of the visible cards, by their places in CUDA's order; one may not be there at all.

    Reading PCIe traffic takes 40 ms a card. So as many cards take their turn in one row as fit
    into ``pcie_budget_s``, one at least, and the others' cells are empty in that row.
    """

    def __init__(
        self,
        indices: Sequence[int],
        visible: Sequence[NvmlDevice],
        pcie_budget_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.indices = tuple(indices)
        self._cards = {index: visible[index] for index in indices if index < len(visible)}
        self._pcie_queue = list(self._cards)
        self._budget_s = pcie_budget_s
        self._clock = clock

    def cells(self, seen: HostSnapshot, ranks: Sequence[int]) -> dict[str, float | None]:
        """The cells of all cards now. ``ranks`` are process ids, empty while not known."""
        cells: dict[str, float | None] = {}
        own = set().union(*map(seen.tree, ranks))
        for index, card in self._cards.items():
            reading = card.read_counters()
            others = count_other_processes(card.compute_pids(), own, in_host_pid_namespace())
            cells.update(
                {telemetry_csv.gpu_column(index, what): value for what, value in reading.items()}
            )
            cells[telemetry_csv.gpu_column(index, telemetry_csv.OTHER_PROCESSES)] = others
        return cells | self._pcie_cells()

    def _pcie_cells(self) -> dict[str, float | None]:
        cells: dict[str, float | None] = {}
        end_s = self._clock() + self._budget_s
        for _ in range(len(self._pcie_queue)):
            index = self._pcie_queue.pop(0)
            self._pcie_queue.append(index)
            traffic = self._cards[index].pcie_traffic()
            cells.update(
                {telemetry_csv.gpu_column(index, what): value for what, value in traffic.items()}
            )
            if self._clock() >= end_s:
                break
        return cells


@functools.cache
def in_host_pid_namespace() -> bool:
    """Whether this process sees process ids as the driver does: outside of any container."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def count_other_processes(
    pids: Collection[int] | None, own: Collection[int], pids_true: bool
) -> int | None:
    """How many of the processes on a card are not the ranks or their descendants.

    In a container, ids may be the host's: they are believed only where one of them is ours.
    None where nothing can be said, as before the ranks are known.
    """
    if pids is None or not own:
        return None
    if not pids_true and not set(pids) & set(own):
        return None
    return len(set(pids) - set(own))


# The telemetry sampler: a process beside the run that writes telemetry.csv until it is stopped.
#
# python -m nfold.telemetry.sampler --csv F --ranks F --gpus 0,1 --interval 1.0
#
# It ends on SIGTERM with a last row, and is killed by the kernel when its parent ends. A row
# costs 1.7 ms of CPU time where 86 processes are to be seen (AMD EPYC, no GPU), about 20 µs for
# each more.


def start_sampler(
    csv: Path, ranks: Path, gpus: tuple[int, ...], interval_s: float
) -> subprocess.Popen[bytes]:
    """Start a sampler that writes ``csv`` every ``interval_s``; its errors go to a log beside it.

    ``ranks`` is a JSON file of process ids by rank, which may appear late and be replaced;
    ``gpus`` are places in CUDA's order, that is, after ``CUDA_VISIBLE_DEVICES``.
    """
    if not interval_s > 0:
        raise UsageError(f"telemetry interval {interval_s} s: allowed are seconds above 0")
    options = {
        "--csv": str(csv),
        "--ranks": str(ranks),
        "--gpus": ",".join(map(str, gpus)),
        "--interval": str(interval_s),
    }
    said = [f"{name}={value}" for name, value in options.items()]
    with csv.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            # -P: a user's own csv.py in the working directory is not Python's.
            [sys.executable, "-P", "-m", "nfold.telemetry.sampler", *said],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=child_environment(),
            start_new_session=True,
        )


class TelemetrySampler:
    """Takes rows. ``parent`` is the process id of nfold, whose own load is not another's."""

    def __init__(self, csv: Path, ranks: Path, gpus: GpuSampler, parent: int) -> None:
        self._ranks = ranks
        self._gpus = gpus
        self._parent = parent
        self._before: HostSnapshot | None = None
        self._rank_columns: set[int] = set()
        self._table = TelemetryTable(csv, telemetry_csv.column_names(gpus.indices, ()))

    def sample(self) -> None:
        """Take one row; rates in it cover the time since the one before."""
        pids = read_rank_pids(self._ranks)
        self._make_room_for(pids)
        utc = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        seen = take_snapshot()
        row: dict[str, CellValue] = {
            telemetry_csv.MONOTONIC: f"{seen.at_s:.6f}",
            telemetry_csv.UTC: utc,
        }
        row.update(self._gpus.cells(seen, list(pids.values())))
        row.update(host_cells(self._before, seen, list(pids.values()), self._parent))
        row.update(rank_cells(self._before, seen, pids))
        self._table.append(row)
        self._before = seen

    def close(self) -> None:
        """Close the file."""
        self._table.close()

    def _make_room_for(self, pids: Mapping[int, int]) -> None:
        if not self._rank_columns.issuperset(pids):
            self._rank_columns.update(pids)
            self._table.widen(telemetry_csv.column_names(self._gpus.indices, self._rank_columns))


def read_rank_pids(file: Path) -> dict[int, int]:
    """Process ids by rank; none while the file is not there yet."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        return {}
    return {int(rank): int(pid) for rank, pid in json.loads(text).items()}


def host_cells(
    before: HostSnapshot | None, after: HostSnapshot, ranks: Sequence[int], parent: int
) -> dict[str, float | None]:
    """The host's columns; all are rates, so the first row has none."""
    if before is None:
        return {}
    interval = SnapshotInterval(before, after)
    return {
        telemetry_csv.HOST_CPU: interval.cpu_percent(),
        telemetry_csv.HOST_DISK_READ: interval.disk_read_bytes_per_s(),
        telemetry_csv.HOST_OTHER_LOAD: interval.other_load_percent(ranks, parent),
    }


def rank_cells(
    before: HostSnapshot | None, after: HostSnapshot, ranks: Mapping[int, int]
) -> dict[str, float | None]:
    """The ranks' columns, each with its descendants (loader workers)."""
    cells: dict[str, float | None] = {}
    for rank, pid in ranks.items():
        if before is not None:
            cpu = SnapshotInterval(before, after).tree_cpu_percent(pid)
            cells[telemetry_csv.rank_column(rank, telemetry_csv.RANK_CPU)] = cpu
        cells[telemetry_csv.rank_column(rank, telemetry_csv.RANK_RSS)] = after.tree_rss_bytes(pid)
    return cells


def next_deadline(start_s: float, interval_s: float, now_s: float) -> float:
    """The first moment start + k × interval after now: late rows are left out, none drifts."""
    return start_s + (math.floor((now_s - start_s) / interval_s) + 1) * interval_s


class SignalWaiter:
    """Waits for a signal to stop, without losing one that comes while nobody waits."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: None)

    def wait(self, seconds: float) -> bool:
        """Whether a signal has come, at the latest after so many seconds."""
        ready, _, _ = select.select([self._reader], [], [], max(0.0, seconds))
        return bool(ready)


def sample_until_signal(sampler: TelemetrySampler, interval_s: float, ending: SignalWaiter) -> None:
    """A row now, one at every deadline, and a last one when it is asked to end."""
    start_s = time.monotonic()
    ended = False
    while not ended:
        sampler.sample()
        deadline_s = next_deadline(start_s, interval_s, time.monotonic())
        ended = ending.wait(deadline_s - time.monotonic())
    sampler.sample()
    sampler.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """The process: its lifeline first, then rows until the end."""
    die_with_parent()
    ending = SignalWaiter()
    parser = argparse.ArgumentParser(prog="nfold.telemetry.sampler")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--ranks", type=Path, required=True)
    parser.add_argument("--gpus", default="")
    parser.add_argument("--interval", type=float, default=1.0)
    asked = parser.parse_args(arguments)
    indices = [int(gpu) for gpu in asked.gpus.split(",") if gpu]
    with Nvml() as nvml:
        visible = nvml.cards(os.environ.get(VISIBLE_VARIABLE)) if indices else ()
        gpus = GpuSampler(indices, visible, pcie_budget_s=asked.interval / 4)
        sampler = TelemetrySampler(asked.csv, asked.ranks, gpus, parent=os.getppid())
        sample_until_signal(sampler, asked.interval, ending)


if __name__ == "__main__":
    main()
