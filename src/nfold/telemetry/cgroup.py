"""The limits that a container or a service manager sets: CPU quota and memory, cgroup v1 and v2.

See the kernel's Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and
scheduler/sched-bwc.rst. A limit of any group above this process's own holds too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class CgroupLimit:
    """A limit and the file that says it."""

    value: float
    source: str


def cpu_quota_cores(root: Path = Path("/")) -> CgroupLimit | None:
    """How many cores' worth of time this process may use; None where nothing limits it."""
    v2 = [_v2_quota(folder / "cpu.max") for folder in _groups(root, "")]
    v1 = [_v1_quota(folder) for folder in _groups(root, "cpu")]
    return _least([*v2, *v1])


def memory_limit_bytes(root: Path = Path("/")) -> CgroupLimit | None:
    """How much memory this process may use; None where nothing limits it.

    An unlimited v1 group says nearly 2**63: the caller takes the smaller of it and the host's.
    """
    v2 = [_number(folder / "memory.max") for folder in _groups(root, "")]
    v1 = [_number(folder / "memory.limit_in_bytes") for folder in _groups(root, "memory")]
    return _least([*v2, *v1])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of all above it; "" is the v2 hierarchy."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = PurePosixPath(path.lstrip("/"))
            for group in (own, *own.parents):
                yield root / "sys/fs/cgroup" / controllers / group


def _v2_quota(file: Path) -> CgroupLimit | None:
    """``cpu.max`` holds a quota, or ``max``, and a period, both in µs."""
    words = _text(file).split()
    if len(words) != 2 or words[0] == "max":
        return None
    return CgroupLimit(int(words[0]) / int(words[1]), str(file))


def _v1_quota(folder: Path) -> CgroupLimit | None:
    """A quota of -1 is none."""
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
    """The file's text, or nothing where a container does not show the file."""
    try:
        return file.read_text()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""
