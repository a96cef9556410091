"""Facts about this machine now that are not its description: what obstacles are judged by."""

from __future__ import annotations

import os
import resource
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from nfold.telemetry.cgroup import CgroupLimit, cpu_quota_cores
from nfold.telemetry.inspection import affinity_cores
from nfold.telemetry.nvml import VISIBLE_VARIABLE, Nvml, NvmlDevice, PcieLink

MAX_PCIE_LANES = 32


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """One visible GPU now; None where it does not say.

    ``pids`` are the processes that compute on it; ``iommu`` is the kernel's type of the IOMMU
    group that it is in (``identity``, ``DMA``, ``DMA-FQ``); ``card_lanes`` are the PCIe lanes
    that the card has, whatever its slot has.
    """

    index: int
    pids: tuple[int, ...] | None = None
    memory_used_bytes: int | None = None
    pcie: PcieLink = field(default_factory=PcieLink)
    has_mig_instances: bool = False
    iommu: str | None = None
    card_lanes: int | None = None


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The machine now. ``load_average`` is over the last minute, of the whole host."""

    host_cores: int
    affinity_cores: int
    cpu_quota: CgroupLimit | None = None
    load_average: float | None = None
    open_files: int | None = None
    """None where unlimited."""
    omp_num_threads: str | None = None
    visible_devices: str | None = None
    nvml_error: str | None = None
    device_files: tuple[str, ...] = ()
    """The GPUs' device files, such as /dev/nvidia0."""
    installed_gpus: int = 0
    """GPUs that the driver knows, also those that ``visible_devices`` hides."""
    gpus: tuple[GpuFacts, ...] = ()


def gather_facts(nvml: Nvml) -> MachineFacts:
    """The facts of this machine, as this process sees it."""
    visible = os.environ.get(VISIBLE_VARIABLE)
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    cards = enumerate(nvml.cards(visible))
    return MachineFacts(
        host_cores=os.cpu_count() or 1,
        affinity_cores=affinity_cores(),
        cpu_quota=cpu_quota_cores(),
        load_average=os.getloadavg()[0],
        open_files=None if open_files == resource.RLIM_INFINITY else open_files,
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        visible_devices=visible,
        nvml_error=nvml.error,
        device_files=device_files(),
        installed_gpus=len(nvml.cards()),
        gpus=tuple(gather_gpu_facts(index, card, {os.getpid()}) for index, card in cards),
    )


def device_files(dev: Path = Path("/dev")) -> tuple[str, ...]:
    """The device files of NVIDIA GPUs, whether or not a driver answers."""
    return tuple(sorted(str(file) for file in dev.glob("nvidia[0-9]*")))


def gather_gpu_facts(
    index: int, card: NvmlDevice, own: Collection[int], devices: Path = Path("/sys/bus/pci/devices")
) -> GpuFacts:
    """What one card says now; processes in ``own`` are left out."""
    pids = card.compute_pids()
    folder = devices / (card.bus_id or "unknown")
    return GpuFacts(
        index=index,
        pids=None if pids is None else tuple(sorted(set(pids) - set(own))),
        memory_used_bytes=card.memory_used_bytes(),
        pcie=card.pcie_link(),
        has_mig_instances=card.has_mig_instances(),
        iommu=_read_text(folder / "iommu_group" / "type"),
        card_lanes=_lanes(_read_text(folder / "max_link_width")),
    )


def _read_text(file: Path) -> str | None:
    return file.read_text().strip() if file.exists() else None


def _lanes(text: str | None) -> int | None:
    """Virtual machines say 0 or 255 where they do not know."""
    lanes = int(text) if text and text.isdecimal() else 0
    return lanes if 0 < lanes <= MAX_PCIE_LANES else None
