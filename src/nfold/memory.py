"""The host's memory as the kernel sees it."""

from __future__ import annotations

import resource
from pathlib import Path


def free_memory_bytes() -> int:
    """What a new process may take without swapping."""
    return parse_available_bytes(Path("/proc/meminfo").read_text())


def peak_resident_bytes() -> int:
    """The most memory that this process held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def parse_available_bytes(meminfo: str) -> int:
    """What ``meminfo`` estimates to be available (proc(5))."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
