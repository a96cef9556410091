"""Obstacles: conditions of this machine, now, that will slow training down."""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nfold.core.machine import Machine
from nfold.telemetry.machine_inspection import CgroupLimit, affinity_cores, cpu_quota_cores
from nfold.telemetry.nvml import VISIBLE_VARIABLE, Nvml, NvmlDevice, PcieLink

MAX_PCIE_LANES = 32
CORES_PER_GPU = 2  # one for the training loop, one for a loader worker
MIN_SHM_BYTES = 2**30
MIN_OPEN_FILES = 4096  # common default: 1,024; each batch of a loader worker may hold several
BUSY_LOAD_SHARE = 0.5
FOREIGN_MEMORY_SHARE = 0.05  # the driver itself uses less than 5 % of a GPU's memory


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The state of a visible GPU; None: unknown.

    ``pids`` are the processes that compute on it, ``iommu`` is the type of its IOMMU group
    (``identity``, ``DMA``, ``DMA-FQ``), ``card_lanes`` are the PCIe lanes of the card itself.
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
    """The state of the machine.

    Attributes:
        load_average: of the host in the last minute.
        open_files: limit of open files, None if unlimited.
        device_files: of GPUs, such as /dev/nvidia0.
        installed_gpus: known to the driver, also those that ``visible_devices`` hides.
    """

    host_cores: int
    affinity_cores: int
    cpu_quota: CgroupLimit | None = None
    load_average: float | None = None
    open_files: int | None = None
    omp_num_threads: str | None = None
    visible_devices: str | None = None
    nvml_error: str | None = None
    device_files: tuple[str, ...] = ()
    installed_gpus: int = 0
    gpus: tuple[GpuFacts, ...] = ()


def gather_facts(nvml: Nvml) -> MachineFacts:
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
    """Return the device files of NVIDIA GPUs, with or without a working driver."""
    return tuple(sorted(str(file) for file in dev.glob("nvidia[0-9]*")))


def gather_gpu_facts(
    index: int, card: NvmlDevice, own: Collection[int], devices: Path = Path("/sys/bus/pci/devices")
) -> GpuFacts:
    """Return the state of a GPU; processes in ``own`` are not counted."""
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
    lanes = int(text) if text and text.isdecimal() else 0
    return lanes if 0 < lanes <= MAX_PCIE_LANES else None


@dataclass(frozen=True)
class Obstacle:
    """A condition that will slow training down, and the evidence for it."""

    text: str
    evidence: str


def find_obstacles(machine: Machine, facts: MachineFacts) -> list[Obstacle]:
    """Return everything that will slow training down, the most serious kind first."""
    rules = (
        _unusable_gpus, _busy_gpus, _scarce_cores, _scarce_resources, _slow_links, _narrow_pcie,
        _mixed_gpus,
    )  # fmt: skip
    return [obstacle for rule in rules for obstacle in rule(machine, facts)]


def _unusable_gpus(machine: Machine, facts: MachineFacts) -> Iterator[Obstacle]:
    version = machine.versions.get("torch", "")
    if machine.gpus:
        if version.endswith("+cpu"):
            yield Obstacle(
                "The installed PyTorch is built without CUDA and cannot use the GPUs",
                f"package metadata: torch {version}",
            )
        return
    everything = "everything runs on CPU devices (shares of the cores)"
    if facts.nvml_error and facts.device_files:
        yield Obstacle(
            f"A GPU exists but its driver does not answer: {everything}. Next: nvidia-smi shows "
            "the reason; in a container, the driver's libraries must be mounted too",
            f"{facts.device_files[0]} exists; nvmlInit: {facts.nvml_error}",
        )
    elif facts.installed_gpus:
        yield Obstacle(
            f"All {facts.installed_gpus} GPUs are hidden: {everything}",
            f"CUDA_VISIBLE_DEVICES={facts.visible_devices!r}",
        )
    else:
        files = ", ".join(facts.device_files) or "none"
        evidence = f"nvmlInit: {facts.nvml_error or 'ok'}; /dev/nvidia[0-9]: {files}"
        yield Obstacle(f"No GPU: {everything}", evidence)


def _busy_gpus(machine: Machine, facts: MachineFacts) -> Iterator[Obstacle]:
    for card in facts.gpus:
        total = machine.gpus[card.index].memory_bytes
        share = (card.memory_used_bytes or 0) / total if total else 0.0
        if card.pids:
            count = len(card.pids)
            others = "Another process is" if count == 1 else f"{count} other processes are"
            yield Obstacle(
                f"{others} on GPU {card.index} and will share it",
                f"nvmlDeviceGetComputeRunningProcesses: {', '.join(map(str, card.pids))}",
            )
        elif share > FOREIGN_MEMORY_SHARE:
            yield Obstacle(
                f"{100 * share:.0f} % of GPU {card.index}'s memory is in use by processes "
                "that are not visible from here",
                f"nvmlDeviceGetMemoryInfo: {card.memory_used_bytes} bytes used",
            )


def _scarce_cores(machine: Machine, facts: MachineFacts) -> Iterator[Obstacle]:
    count = len(machine.gpus)
    if count and machine.cores < CORES_PER_GPU * count:
        each = machine.cores / count
        yield Obstacle(
            f"Only {each:.2g} cores per GPU: decoding, augmentation and the training loops "
            "share them, so that the GPUs will wait for input",
            f"{machine.cores} usable cores (affinity mask and CPU quota), {count} GPUs",
        )
    quota = facts.cpu_quota
    if quota is not None and quota.value < facts.affinity_cores:
        yield Obstacle(
            f"Programs see {facts.affinity_cores} cores but get the time of {quota.value:.3g}: "
            "the kernel will suspend threads beyond that. Next: set OMP_NUM_THREADS and "
            "--workers to fit, or raise the quota",
            f"{quota.source}; affinity mask of {facts.affinity_cores} cores",
        )
    load = facts.load_average
    if load is not None and load > BUSY_LOAD_SHARE * facts.host_cores:
        yield Obstacle(
            "The host's cores are busy with other work: measurements will be slower and noisier",
            f"load average of the last minute {load:.1f} on {facts.host_cores} cores",
        )


def _scarce_resources(machine: Machine, facts: MachineFacts) -> Iterator[Obstacle]:
    advice = "Next: docker run --shm-size=8g, or --workers 0"
    if machine.shm_bytes is None:
        yield Obstacle(f"There is no /dev/shm, which loader workers need. {advice}", "/dev/shm")  # noqa: S108
    elif machine.shm_bytes < MIN_SHM_BYTES:
        yield Obstacle(
            f"Only {machine.shm_bytes / 2**20:.0f} MiB of shared memory: loader workers send "
            f"batches through it and die when it is full. {advice}",
            f"statvfs of /dev/shm: {machine.shm_bytes} bytes",
        )
    if facts.open_files is not None and facts.open_files < MIN_OPEN_FILES:
        yield Obstacle(
            f"At most {facts.open_files} open files per process: loader workers need several "
            f"per queued batch. Next: ulimit -n {16 * MIN_OPEN_FILES}",
            f"getrlimit(RLIMIT_NOFILE): {facts.open_files}",
        )
    value = facts.omp_num_threads
    if value is None:
        return
    evidence = f"OMP_NUM_THREADS={value!r}, {machine.cores} usable cores"
    ranks = max(1, len(machine.gpus))
    first = value.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        yield Obstacle("OMP_NUM_THREADS is not a number of threads and is ignored", evidence)
    elif int(first) * ranks > machine.cores:
        where = f"in each of {ranks} ranks " if ranks > 1 else ""
        yield Obstacle(
            f"OMP_NUM_THREADS starts {first} threads {where}on {machine.cores} cores, more than "
            f"can run. Next: OMP_NUM_THREADS={max(1, machine.cores // ranks)}",
            evidence,
        )


def _slow_links(machine: Machine, facts: MachineFacts) -> Iterator[Obstacle]:
    refused = [link for link in machine.links if link.kind == "none"]
    if refused:
        yield Obstacle(
            f"{_pairs(len(refused), machine)} cannot copy to each other directly (P2P is off): "
            "gradients go through the host's memory",
            f"nvmlDeviceGetP2PStatus of GPUs {refused[0].first} and {refused[0].second}: "
            f"{refused[0].detail}",
        )
    pcie = [link for link in machine.links if link.kind == "pcie"]
    if pcie:
        yield Obstacle(
            f"{_pairs(len(pcie), machine)} have no NVLink: gradients go over PCIe, several "
            "times slower",
            f"nvmlDeviceGetNvLinkState of GPUs {pcie[0].first} and {pcie[0].second}: no "
            f"active link; {pcie[0].detail or 'topology unknown'}",
        )
    over_pcie = any(link.kind != "nvlink" for link in machine.links)
    found = [card for card in facts.gpus if (card.iommu or "").startswith("DMA")]
    if over_pcie and found:
        yield Obstacle(
            "The IOMMU translates the GPUs' addresses: copies between them over PCIe may go "
            "through the processor, or hang. Next: iommu=pt on the kernel's command line",
            f"iommu_group/type of GPU {found[0].index}: {found[0].iommu}",
        )


def _pairs(count: int, machine: Machine) -> str:
    every = len(machine.links)
    return f"The {every} pairs of GPUs" if count == every > 1 else f"{count} of {every} GPU pairs"


def _narrow_pcie(machine: Machine, facts: MachineFacts) -> Iterator[Obstacle]:
    for card in facts.gpus:
        link = card.pcie  # its generation now is no evidence: an idle GPU lowers it
        lanes = max(link.max_width or 0, card.card_lanes or 0)
        if link.width and link.width < lanes:
            yield Obstacle(
                f"GPU {card.index} uses {link.width} of its {lanes} PCIe lanes: copies from the "
                "host are that much slower",
                f"nvmlDeviceGetCurrPcieLinkWidth {link.width}, MaxPcieLinkWidth "
                f"{link.max_width}, max_link_width in /sys {card.card_lanes}",
            )
        most, own = link.system_generation, link.card_generation
        if most and own and most < own:
            yield Obstacle(
                f"GPU {card.index} supports PCIe gen{own}, its slot does gen{most}: each "
                "generation less halves the speed",
                f"nvmlDeviceGetGpuMaxPcieLinkGeneration {own}, MaxPcieLinkGeneration {most}",
            )


def _mixed_gpus(machine: Machine, facts: MachineFacts) -> Iterator[Obstacle]:
    names = sorted({gpu.name for gpu in machine.gpus})
    if len(names) > 1:
        yield Obstacle(
            "The GPUs differ: with equal shares of every batch, all wait for the slowest",
            f"nvmlDeviceGetName: {', '.join(names)}",
        )
    split = [str(card.index) for card in facts.gpus if card.has_mig_instances]
    if split:
        yield Obstacle(
            f"GPU {', '.join(split)} is split into MIG instances: a process can use one, and "
            "instances have no P2P",
            "nvmlDeviceGetMigMode: enabled",
        )
