from __future__ import annotations

import os
from pathlib import Path

import pytest

from nfold.telemetry.nvml import Nvml
from nfold.telemetry.obstacles import device_files, gather_facts, gather_gpu_facts
from nvml_fake import FakeCard, FakeNvml


def test_facts_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    facts = gather_facts(Nvml(FakeNvml([FakeCard(0), FakeCard(1, pids=[os.getpid(), 9])])))
    assert facts.installed_gpus == 2
    assert facts.nvml_error is None
    assert (facts.visible_devices, facts.omp_num_threads) == ("1", "3")
    assert 1 <= facts.affinity_cores <= facts.host_cores
    (card,) = facts.gpus
    assert (card.index, card.pids) == (0, (9,)), "index in CUDA's order, without this process"


def test_without_nvml_the_reason_is_kept() -> None:
    facts = gather_facts(Nvml(FakeNvml([], absent="Driver Not Loaded")))
    assert facts.nvml_error == "Driver Not Loaded"
    assert facts.gpus == ()


def test_only_gpus_are_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert [Path(file).name for file in device_files(tmp_path)] == ["nvidia0", "nvidia12"]


@pytest.mark.parametrize(
    ("message", "lanes"), [("16", 16), ("255", None), ("0", None), ("?", None)]
)
def test_facts_of_a_gpu_from_sysfs(tmp_path: Path, message: str, lanes: int | None) -> None:
    device = tmp_path / "0000:10:00.0"
    (device / "iommu_group").mkdir(parents=True)
    (device / "iommu_group" / "type").write_text("DMA-FQ\n")
    (device / "max_link_width").write_text(f"{message}\n")
    (card,) = Nvml(FakeNvml([FakeCard(0)])).cards()
    facts = gather_gpu_facts(0, card, set(), devices=tmp_path)
    assert (facts.iommu, facts.card_lanes) == ("DMA-FQ", lanes)


def test_an_unknown_gpu_has_no_facts(tmp_path: Path) -> None:
    silent = FakeCard(0, refuses={"ComputeRunningProcesses", "MemoryInfo", "PciInfo", "MigMode"})
    (card,) = Nvml(FakeNvml([silent])).cards()
    facts = gather_gpu_facts(0, card, set(), devices=tmp_path)
    assert (facts.pids, facts.memory_used_bytes, facts.iommu) == (None, None, None)
    assert not facts.has_mig_instances
