"""The machine of a measurement, as a value without names of users or folders."""

from __future__ import annotations

import hashlib
import json
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nfold.core.serialization import deserialize, serialize


@dataclass(frozen=True, kw_only=True)
class GpuInfo:
    """One GPU as its driver describes it; None if the driver does not report a value."""

    index: int
    name: str
    memory_bytes: int | None = None
    uuid: str | None = None
    pcie: str | None = None  # current link, such as ``gen5 x16``


@dataclass(frozen=True, kw_only=True)
class GpuLink:
    """The connection of two GPUs; ``kind`` is ``nvlink``, ``pcie`` or ``none``."""

    first: int
    second: int
    kind: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One host: cores, memory, GPUs, the links between them, and versions of software.

    ``cores`` counts the cores that this process may use (affinity mask and CPU quota).
    ``versions`` has the libraries that decide speed, by package name.
    """

    cpu: str
    cores: int
    memory_bytes: int
    shm_bytes: int | None = None
    os: str = ""
    python: str = ""
    driver: str | None = None
    gpus: tuple[GpuInfo, ...] = ()
    links: tuple[GpuLink, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    limits: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Ten hex digits of the hardware and the software versions."""
        facts = serialize(self)
        for volatile in ("shm_bytes", "limits"):
            del facts[volatile]
        for gpu in facts["gpus"]:
            del gpu["pcie"]  # an idle GPU lowers its link to save power
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def summary(self) -> str:
        """One line for a table's head: ``4 × NVIDIA H200, 64 cores``."""
        names = sorted({gpu.name for gpu in self.gpus})
        gpus = f"{len(self.gpus)} × {' / '.join(names)}, " if self.gpus else ""
        return f"{gpus}{self.cores} cores ({self.cpu}), {self.memory_bytes / 2**30:.0f} GiB"

    def device_count(self, device: str) -> int:
        """Count the devices of a kind (``cuda`` or ``cpu``); a core is a CPU device."""
        return len(self.gpus) if device == "cuda" else self.cores

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, **serialize(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Machine:
        return deserialize(cls, {k: v for k, v in values.items() if k != "id"})


def free_memory_bytes() -> int:
    """Return the memory that a new process can allocate without swapping."""
    return parse_available_bytes(Path("/proc/meminfo").read_text())


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def parse_available_bytes(meminfo: str) -> int:
    """Return MemAvailable of ``/proc/meminfo`` (proc(5))."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
