"""What this machine is, in less than half a second and without importing a framework."""

from __future__ import annotations

import math
import os
import platform
import resource
from importlib import metadata
from pathlib import Path

from nfold.machine import GpuInfo, Machine
from nfold.telemetry.cgroup import cpu_quota_cores, memory_limit_bytes
from nfold.telemetry.host import physical_memory_bytes, shared_memory_bytes
from nfold.telemetry.links import find_gpu_links
from nfold.telemetry.nvml import VISIBLE_VARIABLE, Nvml, NvmlDevice

VERSIONED_LIBRARIES = (
    "torch",
    "numpy",
    "tensorflow",
    "jax",
    "jaxlib",
    "keras",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
"""The packages whose versions decide speed."""

RESOURCE_LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "locked_memory_bytes": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
}


def inspect_machine(nvml: Nvml | None = None) -> Machine:
    """This machine as this process sees it; GPUs are the visible ones in CUDA's order.

    Without NVML (no NVIDIA driver) there are none. ``nvml`` is an open one to use, or None.
    """
    if nvml is None:
        with Nvml() as opened:
            return inspect_machine(opened)
    cards = nvml.cards(os.environ.get(VISIBLE_VARIABLE))
    return Machine(
        cpu=cpu_model(),
        cores=usable_cores(),
        memory_bytes=_memory_bytes(),
        shm_bytes=shared_memory_bytes(),
        os=_os_name(),
        python=platform.python_version(),
        driver=nvml.driver_version(),
        gpus=tuple(_device(index, card) for index, card in enumerate(cards)),
        links=find_gpu_links(cards),
        versions=library_versions(),
        limits={name: _limit(which) for name, which in RESOURCE_LIMITS.items()},
    )


def affinity_cores() -> int:
    """Cores that the affinity mask leaves to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cores() -> int:
    """Whole cores that this process may use: its affinity mask, cut by its CPU quota."""
    quota = cpu_quota_cores()
    allowed = affinity_cores()
    return allowed if quota is None else max(1, min(allowed, math.floor(quota.value)))


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, or its architecture where it has none (ARM)."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def library_versions() -> dict[str, str]:
    """The versions of those of ``LIBRARIES`` that are installed; none is imported."""
    found = {}
    for library in VERSIONED_LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def _memory_bytes() -> int:
    limit = memory_limit_bytes()
    physical = physical_memory_bytes()
    return physical if limit is None else min(physical, int(limit.value))


def _os_name() -> str:
    """The distribution and the kernel."""
    kernel = f"{platform.system()} {platform.release()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (OSError, KeyError):
        return kernel


def _device(index: int, card: NvmlDevice) -> GpuInfo:
    return GpuInfo(
        index=index,
        name=card.name or "unknown GPU",
        memory_bytes=card.memory_bytes(),
        uuid=card.uuid,
        pcie=str(card.pcie_link()) or None,
    )


def _limit(which: int) -> str:
    soft, _ = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
