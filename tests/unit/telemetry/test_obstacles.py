from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from made import machine
from nfold.core.machine import GpuInfo, GpuLink, Machine
from nfold.telemetry.machine_inspection import CgroupLimit
from nfold.telemetry.nvml import PcieLink
from nfold.telemetry.obstacles import GpuFacts, MachineFacts, Obstacle, find_obstacles

FULL = PcieLink(generation=1, width=16, system_generation=5, card_generation=5, max_width=16)


def _machine(gpus: int = 0, cores: int = 16, **changes: Any) -> Machine:
    made = machine(gpus=gpus, cores=cores)
    return dataclasses.replace(made, **{"shm_bytes": 2**33, **changes})


def _facts(count: int = 0, **changes: Any) -> MachineFacts:
    gpus = tuple(GpuFacts(index=i, pids=(), pcie=FULL) for i in range(count))
    facts = {"host_cores": 16, "affinity_cores": 16, "open_files": 65536, "gpus": gpus}
    return MachineFacts(**{**facts, "installed_gpus": count, **changes})


def _card(**changes: Any) -> dict[str, Any]:
    """Facts whose only card is as ``changes`` say."""
    return {"gpus": (GpuFacts(**{"index": 0, "pcie": FULL, **changes}),)}


def _links(kind: str, detail: str = "") -> tuple[GpuLink, ...]:
    return (GpuLink(first=0, second=1, kind=kind, detail=detail),)


def _one(host: Machine, facts: MachineFacts) -> Obstacle:
    (found,) = find_obstacles(host, facts)
    return found


def test_a_good_machine_has_none() -> None:
    host = _machine(2, cores=16, links=_links("nvlink", "18 links"), versions={"torch": "2.11.0"})
    facts = _facts(2, omp_num_threads="8", load_average=0.3, nvml_error=None)
    assert find_obstacles(host, facts) == []


def test_no_gpu_means_cpu_devices() -> None:
    found = _one(_machine(), _facts(nvml_error="NVML Shared Library Not Found"))
    assert "CPU devices" in found.text
    assert "NVML Shared Library Not Found" in found.evidence


def test_a_gpu_whose_driver_does_not_answer() -> None:
    facts = _facts(nvml_error="Driver Not Loaded", device_files=("/dev/nvidia0",))
    found = _one(_machine(), facts)
    assert "driver does not answer" in found.text
    assert found.evidence == "/dev/nvidia0 exists; nvmlInit: Driver Not Loaded"


def test_gpus_that_are_hidden() -> None:
    found = _one(_machine(), _facts(installed_gpus=4, visible_devices="\x1b[31m"))
    assert "All 4 GPUs are hidden" in found.text
    assert found.evidence == r"CUDA_VISIBLE_DEVICES='\x1b[31m'"


def test_a_pytorch_that_cannot_use_them() -> None:
    found = _one(_machine(1, versions={"torch": "2.13.0+cpu"}), _facts(1))
    assert "without CUDA" in found.text
    assert "2.13.0+cpu" in found.evidence


def test_other_processes_on_the_card() -> None:
    assert "Another process is on GPU 0" in _one(_machine(1), _facts(1, **_card(pids=(41,)))).text
    found = _one(_machine(1), _facts(1, **_card(pids=(41, 42))))
    assert "2 other processes are on GPU 0" in found.text
    assert found.evidence.endswith("41, 42")


@pytest.mark.parametrize("pids", [(), None])
def test_memory_held_by_processes_that_cannot_be_seen(pids: tuple[int, ...] | None) -> None:
    found = _one(_machine(1), _facts(1, **_card(pids=pids, memory_used_bytes=2**33)))
    assert "50 % of GPU 0's memory" in found.text
    little = _facts(1, **_card(pids=pids, memory_used_bytes=2**28))
    assert find_obstacles(_machine(1), little) == []


def test_one_core_per_gpu() -> None:
    host = _machine(4, cores=4, links=_links("nvlink"))
    found = _one(host, _facts(4))
    assert "Only 1 cores per GPU" in found.text
    assert "4 usable cores" in found.evidence
    assert find_obstacles(_machine(4, cores=8, links=_links("nvlink")), _facts(4)) == []


def test_a_quota_below_the_cores_that_are_seen() -> None:
    found = _one(_machine(1), _facts(1, cpu_quota=CgroupLimit(2.5, "/sys/fs/cgroup/cpu.max")))
    assert "see 16 cores but get the time of 2.5" in found.text
    assert "/sys/fs/cgroup/cpu.max" in found.evidence
    assert find_obstacles(_machine(1), _facts(1, cpu_quota=CgroupLimit(16, "cpu.max"))) == []


def test_a_busy_host() -> None:
    assert "load average" in _one(_machine(1), _facts(1, load_average=12.0)).evidence
    assert find_obstacles(_machine(1), _facts(1, load_average=4.0)) == []


@pytest.mark.parametrize("size", [None, 64 * 2**20])
def test_little_shared_memory(size: int | None) -> None:
    found = _one(_machine(1, shm_bytes=size), _facts(1))
    assert "--shm-size" in found.text
    assert "/dev/shm" in found.evidence
    assert find_obstacles(_machine(1, shm_bytes=2**30), _facts(1)) == []


def test_few_open_files() -> None:
    assert "1024" in _one(_machine(1), _facts(1, open_files=1024)).evidence
    assert find_obstacles(_machine(1), _facts(1, open_files=None)) == []


@pytest.mark.parametrize("value", ["0", "", "-2", "many", "1.5"])
def test_threads_that_are_no_number(value: str) -> None:
    found = _one(_machine(1), _facts(1, omp_num_threads=value))
    assert "is not a number" in found.text
    assert repr(value) in found.evidence


def test_more_threads_than_cores_once_every_rank_has_them() -> None:
    host = _machine(4, links=_links("nvlink"))
    found = _one(host, _facts(4, omp_num_threads="16"))
    assert "16 threads in each of 4 ranks on 16 cores" in found.text
    assert "OMP_NUM_THREADS=4" in found.text
    assert find_obstacles(host, _facts(4, omp_num_threads="4")) == []
    assert find_obstacles(_machine(1), _facts(1, omp_num_threads="16,2")) == []


def test_no_peer_to_peer_and_no_nvlink() -> None:
    refused = _one(_machine(2, links=_links("none", "P2P: not supported")), _facts(2))
    assert "P2P is off" in refused.text
    assert "not supported" in refused.evidence
    plain = _one(_machine(2, links=_links("pcie", "same switch")), _facts(2))
    assert "no NVLink" in plain.text
    assert "same switch" in plain.evidence


def test_some_pairs_are_counted() -> None:
    links = (*_links("nvlink"), GpuLink(first=0, second=2, kind="pcie"))
    assert "1 of 2 GPU pairs" in _one(_machine(3, links=links), _facts(3)).text


def test_an_iommu_matters_where_copies_go_over_pcie() -> None:
    cards = _card(iommu="DMA-FQ")
    texts = [o.text for o in find_obstacles(_machine(2, links=_links("pcie")), _facts(2, **cards))]
    assert any("IOMMU" in text for text in texts)
    assert find_obstacles(_machine(2, links=_links("nvlink")), _facts(2, **cards)) == []
    passed = _facts(2, **_card(iommu="identity"))
    assert len(find_obstacles(_machine(2, links=_links("pcie")), passed)) == 1


def test_a_narrow_and_a_slow_slot() -> None:
    narrow = dataclasses.replace(FULL, width=8)
    assert "8 of its 16 PCIe lanes" in _one(_machine(1), _facts(1, **_card(pcie=narrow))).text
    slot = dataclasses.replace(FULL, width=8, max_width=8)
    found = _one(_machine(1), _facts(1, **_card(pcie=slot, card_lanes=16)))
    assert "8 of its 16 PCIe lanes" in found.text
    slow = dataclasses.replace(FULL, system_generation=3)
    assert "slot does gen3" in _one(_machine(1), _facts(1, **_card(pcie=slow))).text
    assert find_obstacles(_machine(1), _facts(1, **_card(pcie=PcieLink()))) == []


def test_gpus_of_two_kinds() -> None:
    kinds = (GpuInfo(index=0, name="A"), GpuInfo(index=1, name="B"))
    host = dataclasses.replace(_machine(2, links=_links("nvlink")), gpus=kinds)
    assert "A, B" in _one(host, _facts(2)).evidence


def test_a_card_in_instances() -> None:
    assert "MIG" in _one(_machine(1), _facts(1, **_card(has_mig_instances=True))).text
