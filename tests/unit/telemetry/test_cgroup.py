from __future__ import annotations

from pathlib import Path

import pytest

from nfold.telemetry.machine_inspection import cpu_quota_cores, memory_limit_bytes


def _host(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_v2_takes_the_tightest_limit_on_the_way_up(tmp_path: Path) -> None:
    host = _host(
        tmp_path,
        "0::/pod/box\n",
        {
            "sys/fs/cgroup/pod/box/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": "1073741824\n",
        },
    )
    quota, memory = cpu_quota_cores(host), memory_limit_bytes(host)
    assert quota is not None
    assert quota.value == pytest.approx(1.5)
    assert quota.source.endswith("pod/cpu.max")
    assert memory is not None
    assert memory.value == 2**30


def test_v1_in_a_container_that_shows_only_the_top(tmp_path: Path) -> None:
    host = _host(
        tmp_path,
        "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        {
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2147483648\n",
        },
    )
    quota, memory = cpu_quota_cores(host), memory_limit_bytes(host)
    assert quota is not None
    assert quota.value == pytest.approx(2.5)
    assert memory is not None
    assert memory.value == 2**31


def test_no_quota(tmp_path: Path) -> None:
    host = _host(
        tmp_path,
        "5:cpu:/\n0::/\n",
        {
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
        },
    )
    assert cpu_quota_cores(host) is None
    assert memory_limit_bytes(host) is None


def test_a_system_without_cgroups(tmp_path: Path) -> None:
    assert cpu_quota_cores(tmp_path) is None
    assert memory_limit_bytes(tmp_path) is None
