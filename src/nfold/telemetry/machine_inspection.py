"""Inspects this machine in less than half a second, without importing a framework."""

from __future__ import annotations

import math
import os
import platform
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import combinations
from pathlib import Path, PurePosixPath

from nfold.core.machine import GpuInfo, GpuLink, Machine
from nfold.telemetry.host import physical_memory_bytes, shared_memory_bytes
from nfold.telemetry.nvml import (
    NVSWITCH,
    P2P_NVLINK,
    P2P_OK,
    P2P_READ,
    P2P_REFUSALS,
    TOPOLOGY_LEVELS,
    VISIBLE_VARIABLE,
    Nvml,
    NvmlDevice,
)

VERSIONED_LIBRARIES = (
    "torch", "numpy", "tensorflow", "jax", "jaxlib", "keras", "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip

RESOURCE_LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "locked_memory_bytes": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
}


def inspect_machine(nvml: Nvml | None = None) -> Machine:
    """Return this machine as this process sees it, with the visible GPUs in CUDA's order.

    Without NVML (no NVIDIA driver) there are no GPUs.
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
    """Return the number of cores in this process's affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cores() -> int:
    """Return the whole cores that this process may use: affinity mask and CPU quota."""
    quota = cpu_quota_cores()
    allowed = affinity_cores()
    return allowed if quota is None else max(1, min(allowed, math.floor(quota.value)))


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, or its architecture if it has none (ARM)."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def library_versions() -> dict[str, str]:
    """Return the versions of the installed ``VERSIONED_LIBRARIES``, without importing them."""
    found = {}
    for library in VERSIONED_LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[library] = metadata.version(library)
    return found


def _memory_bytes() -> int:
    limit = memory_limit_bytes()
    physical = physical_memory_bytes()
    return physical if limit is None else min(physical, int(limit.value))


def _os_name() -> str:
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


def find_gpu_links(cards: Sequence[NvmlDevice]) -> tuple[GpuLink, ...]:
    """Return one link per pair of GPUs, by their indices in ``cards``."""
    pairs = combinations(enumerate(cards), 2)
    return tuple(classify_link(first, second, a, b) for (first, a), (second, b) in pairs)


def classify_link(first: int, second: int, a: NvmlDevice, b: NvmlDevice) -> GpuLink:
    """Return a link: ``none`` without peer-to-peer copies, else ``nvlink`` or ``pcie``.

    Without peer-to-peer copies a transfer goes through the host's memory.
    """
    detail = _nvlinks(a, b)
    pair = a.pair_with(b)
    level = pair.topology_level()
    common = "" if level is None else TOPOLOGY_LEVELS.get(level, "")
    status = pair.p2p_status(P2P_READ)
    if status in P2P_REFUSALS:
        parts = filter(None, [f"P2P: {P2P_REFUSALS[status]}", detail, common])
        return GpuLink(first=first, second=second, kind="none", detail=", ".join(parts))
    if detail or pair.p2p_status(P2P_NVLINK) == P2P_OK:
        return GpuLink(first=first, second=second, kind="nvlink", detail=detail)
    return GpuLink(first=first, second=second, kind="pcie", detail=common)


def _nvlinks(a: NvmlDevice, b: NvmlDevice) -> str:
    direct = a.nvlink_peers.count(b.bus_id) if b.bus_id else 0
    if direct:
        return f"{direct} links"
    switched = min(a.nvlink_peers.count(NVSWITCH), b.nvlink_peers.count(NVSWITCH))
    return f"{switched} links through NVSwitch" if switched else ""


# CPU quota and memory limits of containers and service managers, cgroup v1 and v2. See the kernel's
# Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and scheduler/sched-bwc.rst. Limits
# of parent groups hold as well.


@dataclass(frozen=True)
class CgroupLimit:
    """A limit and the file that contains it."""

    value: float
    source: str


def cpu_quota_cores(root: Path = Path("/")) -> CgroupLimit | None:
    """Return the CPU time per second that this process may use; None: unlimited."""
    v2 = [_v2_quota(folder / "cpu.max") for folder in _groups(root, "")]
    v1 = [_v1_quota(folder) for folder in _groups(root, "cpu")]
    return _least([*v2, *v1])


def memory_limit_bytes(root: Path = Path("/")) -> CgroupLimit | None:
    """Return the memory that this process may use; None: unlimited.

    An unlimited v1 group contains nearly 2**63, so compare with the memory of the host.
    """
    v2 = [_number(folder / "memory.max") for folder in _groups(root, "")]
    v1 = [_number(folder / "memory.limit_in_bytes") for folder in _groups(root, "memory")]
    return _least([*v2, *v1])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = PurePosixPath(path.lstrip("/"))
            for group in (own, *own.parents):
                yield root / "sys/fs/cgroup" / controllers / group


def _v2_quota(file: Path) -> CgroupLimit | None:
    words = _text(file).split()
    if len(words) != 2 or words[0] == "max":
        return None
    return CgroupLimit(int(words[0]) / int(words[1]), str(file))


def _v1_quota(folder: Path) -> CgroupLimit | None:
    quota = _number(folder / "cpu.cfs_quota_us")
    period = _number(folder / "cpu.cfs_period_us")
    if quota is None or period is None or quota.value <= 0:
        return None
    return CgroupLimit(quota.value / period.value, quota.source)


def _number(file: Path) -> CgroupLimit | None:
    text = _text(file).strip()
    return None if text in ("", "max") else CgroupLimit(int(text), str(file))


def _least(limits: list[CgroupLimit | None]) -> CgroupLimit | None:
    known = [limit for limit in limits if limit is not None]
    return min(known, key=lambda limit: limit.value) if known else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""
