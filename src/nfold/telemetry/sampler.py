"""The telemetry sampler: a process that writes telemetry.csv until it is stopped.

    python -m nfold.telemetry.sampler --csv F --ranks F --gpus 0,1 --interval 1.0

It ends on SIGTERM with a last row, and is killed by the kernel when its parent ends. A row costs
1.7 ms of CPU time with 86 visible processes (AMD EPYC, no GPU), about 20 µs for each further one.
"""

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

from nfold.core.child_process import die_with_parent
from nfold.core.errors import UsageError
from nfold.telemetry import telemetry_csv
from nfold.telemetry.host import HostSnapshot, SnapshotInterval, take_snapshot
from nfold.telemetry.nvml import VISIBLE_VARIABLE, Nvml, NvmlDevice
from nfold.telemetry.telemetry_csv import CellValue, TelemetryTable, gpu_column, rank_column

_HOST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel, as NVML's ids


class GpuSampler:
    """Reads visible GPUs by their indices in CUDA's order; missing GPUs have no cells.

    Reading PCIe traffic takes 40 ms per GPU. Each row reads as many GPUs as fit into
    ``pcie_budget_s``, at least one, in rotation; the cells of the others are empty.
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

    def cells(self, snapshot: HostSnapshot, ranks: Sequence[int]) -> dict[str, float | None]:
        """Return the cells of all GPUs. ``ranks`` are process ids, empty if unknown."""
        cells: dict[str, float | None] = {}
        own = set().union(*map(snapshot.tree, ranks))
        for index, card in self._cards.items():
            reading = card.read_counters()
            others = count_other_processes(card.compute_pids(), own, in_host_pid_namespace())
            reading[telemetry_csv.OTHER_PROCESSES] = others
            cells.update({gpu_column(index, what): value for what, value in reading.items()})
        return cells | self._pcie_cells()

    def _pcie_cells(self) -> dict[str, float | None]:
        cells: dict[str, float | None] = {}
        end_s = self._clock() + self._budget_s
        for _ in range(len(self._pcie_queue)):
            index = self._pcie_queue.pop(0)
            self._pcie_queue.append(index)
            traffic = self._cards[index].pcie_traffic()
            cells.update({gpu_column(index, what): value for what, value in traffic.items()})
            if self._clock() >= end_s:
                break
        return cells


@functools.cache
def in_host_pid_namespace() -> bool:
    """Return whether this process sees the host's process ids, as the driver does."""
    try:
        return os.readlink("/proc/self/ns/pid") == _HOST_PID_NAMESPACE
    except OSError:
        return False


def count_other_processes(
    pids: Collection[int] | None, own: Collection[int], pids_true: bool
) -> int | None:
    """Count the processes on a GPU that are not the ranks or their descendants.

    None if unknown: before the ranks are known, and in a container, where ids may be the host's
    (``pids_true`` is False), if none of the ids is a rank's.
    """
    if pids is None or not own or not (pids_true or set(pids) & set(own)):
        return None
    return len(set(pids) - set(own))


def start_sampler(
    csv: Path, ranks: Path, gpus: tuple[int, ...], interval_s: float
) -> subprocess.Popen[bytes]:
    """Start a sampler that writes a row to ``csv`` every ``interval_s``; errors go to a log.

    ``ranks`` is a JSON file of process ids by rank, which may appear late and be replaced.
    ``gpus`` are indices in CUDA's order, after ``CUDA_VISIBLE_DEVICES``.
    """
    if not interval_s > 0:
        raise UsageError(f"telemetry interval {interval_s} s: allowed are seconds above 0")
    options = (
        f"--csv={csv}",
        f"--ranks={ranks}",
        f"--gpus={','.join(map(str, gpus))}",
        f"--interval={interval_s}",
    )
    with csv.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            # -P: does not import a csv.py in the working directory.
            [sys.executable, "-P", "-m", "nfold.telemetry.sampler", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


class TelemetrySampler:
    """Writes rows of telemetry. ``parent`` is the process id of nfold."""

    def __init__(self, csv: Path, ranks: Path, gpus: GpuSampler, parent: int) -> None:
        self._ranks = ranks
        self._gpus = gpus
        self._parent = parent
        self._before: HostSnapshot | None = None
        self._rank_columns: set[int] = set()
        self._table = TelemetryTable(csv, telemetry_csv.column_names(gpus.indices, ()))

    def sample(self) -> None:
        """Write one row."""
        pids = read_rank_pids(self._ranks)
        if not self._rank_columns.issuperset(pids):
            self._rank_columns.update(pids)
            self._table.widen(telemetry_csv.column_names(self._gpus.indices, self._rank_columns))
        utc = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        snapshot = take_snapshot()
        row: dict[str, CellValue] = {
            telemetry_csv.MONOTONIC: f"{snapshot.at_s:.6f}",
            telemetry_csv.UTC: utc,
        }
        row.update(self._gpus.cells(snapshot, list(pids.values())))
        row.update(host_cells(self._before, snapshot, list(pids.values()), self._parent))
        row.update(rank_cells(self._before, snapshot, pids))
        self._table.append(row)
        self._before = snapshot

    def close(self) -> None:
        self._table.close()


def read_rank_pids(file: Path) -> dict[int, int]:
    """Return process ids by rank; empty if the file does not exist."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        return {}
    return {int(rank): int(pid) for rank, pid in json.loads(text).items()}


def host_cells(
    before: HostSnapshot | None, after: HostSnapshot, ranks: Sequence[int], parent: int
) -> dict[str, float | None]:
    """Return the host's cells; all are rates, so the first row has none."""
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
    """Return the ranks' cells, each with its descendants (loader workers)."""
    cells: dict[str, float | None] = {}
    for rank, pid in ranks.items():
        if before is not None:
            cpu = SnapshotInterval(before, after).tree_cpu_percent(pid)
            cells[rank_column(rank, telemetry_csv.RANK_CPU)] = cpu
        cells[rank_column(rank, telemetry_csv.RANK_RSS)] = after.tree_rss_bytes(pid)
    return cells


def next_deadline(start_s: float, interval_s: float, now_s: float) -> float:
    """Return the first time start + k × interval after now; late rows are skipped."""
    return start_s + (math.floor((now_s - start_s) / interval_s) + 1) * interval_s


class SignalWaiter:
    """Waits for SIGTERM or SIGINT, also if it arrived before the wait."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: None)

    def wait(self, seconds: float) -> bool:
        """Wait for ``seconds`` at most; return whether a signal arrived."""
        ready, _, _ = select.select([self._reader], [], [], max(0.0, seconds))
        return bool(ready)


def sample_until_signal(sampler: TelemetrySampler, interval_s: float, ending: SignalWaiter) -> None:
    """Write a row now, at every deadline, and a last one after the signal."""
    start_s = time.monotonic()
    ended = False
    while not ended:
        sampler.sample()
        deadline_s = next_deadline(start_s, interval_s, time.monotonic())
        ended = ending.wait(deadline_s - time.monotonic())
    sampler.sample()
    sampler.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sampler process."""
    die_with_parent()
    ending = SignalWaiter()
    parser = argparse.ArgumentParser(prog="nfold.telemetry.sampler")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--ranks", type=Path, required=True)
    parser.add_argument("--gpus", default="")
    parser.add_argument("--interval", type=float, default=1.0)
    options = parser.parse_args(arguments)
    indices = [int(gpu) for gpu in options.gpus.split(",") if gpu]
    with Nvml() as nvml:
        visible = nvml.cards(os.environ.get(VISIBLE_VARIABLE)) if indices else ()
        gpus = GpuSampler(indices, visible, pcie_budget_s=options.interval / 4)
        sampler = TelemetrySampler(options.csv, options.ranks, gpus, parent=os.getppid())
        sample_until_signal(sampler, options.interval, ending)


if __name__ == "__main__":
    main()
