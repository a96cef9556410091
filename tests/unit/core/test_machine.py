"""Machines: identity, the line that heads a table, and the JSON form."""

from __future__ import annotations

import dataclasses
import json

import pytest

from nfold.core.machine import GpuInfo, GpuLink, Machine

HOST = Machine(
    cpu="EPYC",
    cores=64,
    memory_bytes=512 * 2**30,
    shm_bytes=2**30,
    os="Linux 6.1",
    python="3.11.7",
    driver="570.1",
    gpus=(
        GpuInfo(index=0, name="H200", memory_bytes=2**37, uuid="GPU-0", pcie="gen5 x16"),
        GpuInfo(index=1, name="H200"),
    ),
    links=(GpuLink(first=0, second=1, kind="nvlink", detail="NV18"),),
    versions={"torch": "2.13.0", "numpy": "2.4"},
    limits={"open files": "1024"},
)


def test_the_id_is_pinned() -> None:
    """Stored measurements are found again by it."""
    assert HOST.id == "aaf368f55b"


def test_json_restores_the_machine_and_contains_its_id() -> None:
    written = json.loads(json.dumps(HOST.to_dict()))
    assert written["id"] == HOST.id
    assert Machine.from_dict(written) == HOST


@pytest.mark.parametrize(
    "change",
    [
        {"cores": 32},
        {"cpu": "Xeon"},
        {"driver": None},
        {"gpus": HOST.gpus[:1]},
        {"links": ()},
        {"versions": {"torch": "2.11.0", "numpy": "2.4"}},
    ],
)
def test_hardware_and_software_decide_the_id(change: dict[str, object]) -> None:
    assert dataclasses.replace(HOST, **change).id != HOST.id  # type: ignore[arg-type]  # any field


def test_volatile_facts_do_not_change_the_id() -> None:
    """Shared memory fills, limits are set per shell, and an idle GPU lowers its link."""
    idle = dataclasses.replace(HOST.gpus[0], pcie="gen1 x16")
    later = dataclasses.replace(HOST, shm_bytes=1, limits={}, gpus=(idle, HOST.gpus[1]))
    assert later.id == HOST.id


def test_the_order_of_versions_leaves_the_id() -> None:
    turned = dict(reversed(HOST.versions.items()))
    assert dataclasses.replace(HOST, versions=turned).id == HOST.id


def test_an_unknown_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="tpus"):
        Machine.from_dict({**HOST.to_dict(), "tpus": 4})


def test_summary_on_gpus_and_without() -> None:
    assert HOST.summary == "2 × H200, 64 cores (EPYC), 512 GiB"
    mixed = (GpuInfo(index=0, name="A"), GpuInfo(index=1, name="B"))
    assert dataclasses.replace(HOST, gpus=mixed).summary.startswith("2 × A / B, ")
    assert dataclasses.replace(HOST, gpus=()).summary == "64 cores (EPYC), 512 GiB"


def test_a_cpu_device_is_a_core() -> None:
    assert HOST.device_count("cuda") == 2
    assert HOST.device_count("cpu") == 64
