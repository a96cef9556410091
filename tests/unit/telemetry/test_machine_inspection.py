from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nfold.core.machine import Machine
from nfold.telemetry import machine_inspection
from nfold.telemetry.machine_inspection import (
    CgroupLimit,
    cpu_model,
    inspect_machine,
    library_versions,
    usable_cores,
)
from nfold.telemetry.nvml import Nvml
from nvml_fake import FakeCard, FakeNvml


def _inspect(*cards: FakeCard) -> Machine:
    return inspect_machine(Nvml(FakeNvml(list(cards))))


def test_this_machine_without_a_driver() -> None:
    machine = inspect_machine(Nvml(FakeNvml([], absent="NVML Shared Library Not Found")))
    assert machine.gpus == ()
    assert machine.driver is None
    assert 1 <= machine.cores <= len(os.sched_getaffinity(0))
    assert machine.memory_bytes > 2**28
    assert machine.cpu
    assert machine.os
    assert machine.versions["torch"]
    assert set(machine.limits) == {"open_files", "locked_memory_bytes", "processes"}
    assert Machine.from_dict(machine.to_dict()) == machine


def test_gpus_are_the_visible_ones_in_cuda_s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    machine = _inspect(FakeCard(0, nvlinks=["1"]), FakeCard(1, nvlinks=["0"]))
    assert [gpu.index for gpu in machine.gpus] == [0, 1]
    assert [gpu.uuid for gpu in machine.gpus] == ["GPU-11aa-bb", "GPU-00aa-bb"]
    assert machine.gpus[0].memory_bytes == 80 * 2**30
    assert machine.gpus[0].pcie == "gen1 x16"
    assert machine.driver == "600.1"
    assert [link.kind for link in machine.links] == ["nvlink"]


def test_a_gpu_that_does_not_answer_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    quiet = {"Name", "MemoryInfo", "UUID", "CurrPcieLinkWidth", "PciInfo"}
    (gpu,) = _inspect(FakeCard(0, refuses=quiet)).gpus
    assert (gpu.memory_bytes, gpu.uuid, gpu.pcie) == (None, None, None)


def test_a_quota_cuts_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_inspection, "affinity_cores", lambda: 16)
    for quota, expected in [(3.5, 3), (0.5, 1), (64.0, 16)]:
        limit = CgroupLimit(quota, "cpu.max")
        monkeypatch.setattr(machine_inspection, "cpu_quota_cores", lambda limit=limit: limit)
        assert usable_cores() == expected


def test_the_affinity_mask_cuts_the_cores() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_the_processor_s_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast CPU: 9000\n")
    assert cpu_model(cpuinfo) == "Fast CPU: 9000"
    assert cpu_model(tmp_path / "missing") == os.uname().machine


def test_versions_are_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine_inspection, "VERSIONED_LIBRARIES", ("psutil", "no-such-package-at-all")
    )
    assert set(library_versions()) == {"psutil"}


def test_it_imports_no_framework_and_takes_little_of_a_second() -> None:
    requested = (
        "import sys, time; from nfold.telemetry.machine_inspection import inspect_machine as inspect\n"
        "begin = time.process_time(); inspect(); print(time.process_time() - begin, *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", requested], capture_output=True, text=True, check=True
    )
    seconds, *modules = done.stdout.split()
    assert not {"torch", "numpy", "tensorflow", "jax", "rich"} & set(modules)
    began = time.process_time()
    sum(range(10_000_000))
    reference_s = time.process_time() - began
    assert float(seconds) < 3 * reference_s, "compared with a loop of about 0.15 s on any machine"
