"""The columns of telemetry.csv: one owner of their names and their order.

    monotonic_s                    when the row was taken, on the host's monotonic clock
    utc                            the same moment in UTC, ISO 8601
    host_cpu_percent               busy share of all cores of the host
    host_disk_read_bytes_per_s     reads of the host's physical disks
    host_other_load_percent        CPU time of everybody else's processes, in % of one core
    gpu{g}_...                     per GPU, g being its place in CUDA's order
    rank{r}_...                    per rank, its descendants included

A rate covers the time since the row before. An empty cell means: not said.
"""

from __future__ import annotations

from collections.abc import Iterable

MONOTONIC = "monotonic_s"
UTC = "utc"
HOST_CPU = "host_cpu_percent"
HOST_DISK_READ = "host_disk_read_bytes_per_s"
HOST_OTHER_LOAD = "host_other_load_percent"

UTILISATION = "utilisation_percent"
MEMORY_USED = "memory_used_bytes"
POWER = "power_w"
TEMPERATURE = "temperature_c"
SM_CLOCK = "sm_clock_mhz"
THROTTLE_REASONS = "throttle_reasons"
PCIE_RX = "pcie_rx_bytes_per_s"
PCIE_TX = "pcie_tx_bytes_per_s"
ENERGY = "energy_j"
OTHER_PROCESSES = "other_processes"

RANK_CPU = "cpu_percent"
RANK_RSS = "rss_bytes"

HOST_COLUMNS = (MONOTONIC, UTC, HOST_CPU, HOST_DISK_READ, HOST_OTHER_LOAD)
GPU_COLUMNS = (
    UTILISATION,
    MEMORY_USED,
    POWER,
    TEMPERATURE,
    SM_CLOCK,
    THROTTLE_REASONS,
    PCIE_RX,
    PCIE_TX,
    ENERGY,
    OTHER_PROCESSES,
)
RANK_COLUMNS = (RANK_CPU, RANK_RSS)


def gpu_column(gpu: int, what: str) -> str:
    """The name of one GPU's column, such as ``gpu0_power_w``."""
    return f"gpu{gpu}_{what}"


def rank_column(rank: int, what: str) -> str:
    """The name of one rank's column, such as ``rank0_rss_bytes``."""
    return f"rank{rank}_{what}"


def column_names(gpus: Iterable[int], ranks: Iterable[int]) -> list[str]:
    """All columns of a run that watches these GPUs and ranks."""
    per_gpu = [gpu_column(gpu, what) for gpu in sorted(gpus) for what in GPU_COLUMNS]
    per_rank = [rank_column(rank, what) for rank in sorted(ranks) for what in RANK_COLUMNS]
    return [*HOST_COLUMNS, *per_gpu, *per_rank]
