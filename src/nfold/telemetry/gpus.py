"""The GPUs' cells of one row."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Sequence

from nfold.telemetry import columns
from nfold.telemetry.host import HostSnapshot
from nfold.telemetry.nvml import NvmlDevice

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
                {columns.gpu_column(index, what): value for what, value in reading.items()}
            )
            cells[columns.gpu_column(index, columns.OTHER_PROCESSES)] = others
        return cells | self._pcie_cells()

    def _pcie_cells(self) -> dict[str, float | None]:
        cells: dict[str, float | None] = {}
        end_s = self._clock() + self._budget_s
        for _ in range(len(self._pcie_queue)):
            index = self._pcie_queue.pop(0)
            self._pcie_queue.append(index)
            traffic = self._cards[index].pcie_traffic()
            cells.update(
                {columns.gpu_column(index, what): value for what, value in traffic.items()}
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
