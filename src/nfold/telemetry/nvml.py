"""NVIDIA's management library: any question may go unanswered, and then the answer is None.

Names and units follow nvml.h (NVML API Reference Guide). Nothing here changes a device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pynvml

from nfold.telemetry import telemetry_csv

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"

# Constants of nvml.h.
_ON_GPU = 0
_SM = 1
_TRANSMITTED, _RECEIVED = 0, 1
_SWITCH_TYPE = 2
_MOST_NVLINKS = 36

# pynvml's own NVML_P2P_CAPS_INDEX_READ is a tuple by mistake, so the numbers of nvml.h are here.
P2P_READ = 0
P2P_NVLINK = 2
P2P_OK = 0
P2P_REFUSALS = {
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the topology does not support it",
    4: "disabled in the driver's settings",
    5: "not supported",
}
"""Why two GPUs cannot reach each other's memory, by ``nvmlGpuP2PStatus_t``."""
TOPOLOGY_LEVELS = {
    0: "same board",
    10: "same switch",
    20: "through several switches",
    30: "same host bridge",
    40: "same NUMA node",
    50: "across NUMA nodes",
}
"""What two GPUs have in common, by ``nvmlGpuTopologyLevel_t``."""

NVSWITCH = "switch"
"""The far end of an NVLink that goes to an NVSwitch."""


@dataclass(frozen=True, kw_only=True)
class PcieLink:
    """A card's PCIe link: generation and lanes, now and at most; None where not said.

    ``system_generation`` is the most that card and slot can do together, ``card_generation``
    and ``lanes`` at most are what the card alone could do. An idle card lowers its generation.
    """

    generation: int | None = None
    width: int | None = None
    system_generation: int | None = None
    card_generation: int | None = None
    max_width: int | None = None

    def __str__(self) -> str:
        known = self.generation is not None and self.width is not None
        return f"gen{self.generation} x{self.width}" if known else ""


class Nvml:
    """An open NVML, or the reason in ``error`` why there is none; close it or use ``with``.

    ``api`` is pynvml or a stand-in of the same shape.
    """

    def __init__(self, api: Any = pynvml) -> None:
        self._api = api
        self.error: str | None = None
        try:
            api.nvmlInit()
        except api.NVMLError as error:
            self.error = str(error)

    def __enter__(self) -> Nvml:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of NVML; a library that is already lost is let go too."""
        if self.error is None:
            self.query("nvmlShutdown")
            self.error = "closed"

    def query(self, call: str, *arguments: Any) -> Any:
        """What an NVML function returns, or None where it answers with an error."""
        try:
            return getattr(self._api, call)(*arguments)
        except self._api.NVMLError:
            return None

    def driver_version(self) -> str | None:
        """The driver's version."""
        version = None if self.error else self.query("nvmlSystemGetDriverVersion")
        return None if version is None else str(version)

    def cards(self, visible: str | None = None) -> tuple[NvmlDevice, ...]:
        """The GPUs in CUDA's order, as ``CUDA_VISIBLE_DEVICES`` = ``visible`` shows them.

        None shows all. Entries are indices, UUIDs or unambiguous beginnings of UUIDs; the first
        wrong entry hides itself and all that follow (CUDA C++ Programming Guide, environment
        variables). An index is the place in PCI bus order, which is CUDA's own order wherever
        the GPUs are of one kind or CUDA_DEVICE_ORDER is PCI_BUS_ID.
        """
        every = self._every_card()
        if visible is None:
            return every
        found: list[NvmlDevice] = []
        for entry in visible.split(","):
            card = self._find_card(entry.strip(), every)
            if card is None:
                break
            found.append(card)
        return tuple(found)

    def _every_card(self) -> tuple[NvmlDevice, ...]:
        count = (None if self.error else self.query("nvmlDeviceGetCount")) or 0
        handles = [self.query("nvmlDeviceGetHandleByIndex", index) for index in range(count)]
        return tuple(NvmlDevice(self, handle) for handle in handles if handle is not None)

    def _find_card(self, entry: str, every: tuple[NvmlDevice, ...]) -> NvmlDevice | None:
        if entry.isdecimal():
            return every[int(entry)] if int(entry) < len(every) else None
        if entry.startswith("MIG-"):
            handle = self.query("nvmlDeviceGetHandleByUUID", entry)
            return None if handle is None else NvmlDevice(self, handle)
        matching = [card for card in every if entry and (card.uuid or "").startswith(entry)]
        return matching[0] if len(matching) == 1 else None


class NvmlDevice:
    """One GPU, or one MIG instance."""

    def __init__(self, nvml: Nvml, handle: Any) -> None:
        self._nvml = nvml
        self.handle = handle

    def _ask(self, call: str, *arguments: Any) -> Any:
        return self._nvml.query(call, self.handle, *arguments)

    def _field(self, call: str, field: str) -> int | None:
        answer = self._ask(call)
        return None if answer is None else int(getattr(answer, field))

    def _scaled(self, call: str, *arguments: Any, scale: float) -> float | None:
        answer = self._ask(call, *arguments)
        return None if answer is None else float(answer) * scale

    @functools.cached_property
    def name(self) -> str | None:
        """The product's name, such as ``NVIDIA H200``."""
        name = self._ask("nvmlDeviceGetName")
        return None if name is None else str(name)

    @functools.cached_property
    def uuid(self) -> str | None:
        """``GPU-`` or ``MIG-`` and 32 hex digits."""
        uuid = self._ask("nvmlDeviceGetUUID")
        return None if uuid is None else str(uuid)

    @functools.cached_property
    def bus_id(self) -> str | None:
        """The PCI address as Linux writes it: ``0000:1b:00.0``."""
        return _address(self._ask("nvmlDeviceGetPciInfo"))

    def memory_bytes(self) -> int | None:
        """The card's memory."""
        return self._field("nvmlDeviceGetMemoryInfo", "total")

    def memory_used_bytes(self) -> int | None:
        """Memory in use by anybody, the driver's own included."""
        return self._field("nvmlDeviceGetMemoryInfo", "used")

    def read_counters(self) -> dict[str, float | None]:
        """The quick counters, by column: everything but PCIe traffic and processes."""
        return {
            telemetry_csv.UTILISATION: self._field("nvmlDeviceGetUtilizationRates", "gpu"),
            telemetry_csv.MEMORY_USED: self.memory_used_bytes(),
            telemetry_csv.POWER: self._scaled("nvmlDeviceGetPowerUsage", scale=1e-3),
            telemetry_csv.TEMPERATURE: self._ask("nvmlDeviceGetTemperature", _ON_GPU),
            telemetry_csv.SM_CLOCK: self._ask("nvmlDeviceGetClockInfo", _SM),
            telemetry_csv.THROTTLE_REASONS: self._throttle_reasons(),
            telemetry_csv.ENERGY: self._scaled("nvmlDeviceGetTotalEnergyConsumption", scale=1e-3),
        }

    def _throttle_reasons(self) -> int | None:
        reasons: int | None = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return reasons

    def pcie_traffic(self) -> dict[str, float | None]:
        """PCIe bytes per second, by column; NVML counts for 20 ms in each of the two calls.

        NVML says KB/s, taken as 1,000 bytes.
        """
        call = "nvmlDeviceGetPcieThroughput"
        return {
            telemetry_csv.PCIE_RX: self._scaled(call, _RECEIVED, scale=1e3),
            telemetry_csv.PCIE_TX: self._scaled(call, _TRANSMITTED, scale=1e3),
        }

    def compute_pids(self) -> tuple[int, ...] | None:
        """The processes with a compute context on the card.

        In a container the ids may be those of the host, or the list may be empty.
        """
        found = self._ask("nvmlDeviceGetComputeRunningProcesses")
        return None if found is None else tuple(int(process.pid) for process in found)

    def has_mig_instances(self) -> bool:
        """Whether the card is split into MIG instances."""
        modes = self._ask("nvmlDeviceGetMigMode")
        return modes is not None and modes[0] == 1

    def pcie_link(self) -> PcieLink:
        """The PCIe link's generation and lanes."""
        return PcieLink(
            generation=self._ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            width=self._ask("nvmlDeviceGetCurrPcieLinkWidth"),
            system_generation=self._ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            card_generation=self._ask("nvmlDeviceGetGpuMaxPcieLinkGeneration"),
            max_width=self._ask("nvmlDeviceGetMaxPcieLinkWidth"),
        )

    @functools.cached_property
    def nvlink_peers(self) -> tuple[str, ...]:
        """Where each active NVLink leads: a PCI address, or ``switch``."""
        state = "nvmlDeviceGetNvLinkState"
        active = [link for link in range(_MOST_NVLINKS) if self._ask(state, link) == 1]
        ends = [self._nvlink_end(link) for link in active]
        return tuple(end for end in ends if end is not None)

    def _nvlink_end(self, link: int) -> str | None:
        if self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", link) == _SWITCH_TYPE:
            return NVSWITCH
        return _address(self._ask("nvmlDeviceGetNvLinkRemotePciInfo", link))

    def p2p_status(self, other: NvmlDevice, what: int) -> int | None:
        """The ``nvmlGpuP2PStatus_t`` of a capability such as ``P2P_READ``; 0 is fine."""
        status: int | None = self._ask("nvmlDeviceGetP2PStatus", other.handle, what)
        return status

    def topology_level(self, other: NvmlDevice) -> int | None:
        """The ``nvmlGpuTopologyLevel_t`` that two cards have in common; see ``ANCESTORS``."""
        level: int | None = self._ask("nvmlDeviceGetTopologyCommonAncestor", other.handle)
        return level


def _address(pci: Any) -> str | None:
    return None if pci is None else f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
