"""NVIDIA's management library (NVML). A query that fails returns None.

Names and units follow nvml.h (NVML API Reference Guide). Nothing here changes a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
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
}  # nvmlGpuP2PStatus_t
TOPOLOGY_LEVELS = {
    0: "same board",
    10: "same switch",
    20: "through several switches",
    30: "same host bridge",
    40: "same NUMA node",
    50: "across NUMA nodes",
}  # nvmlGpuTopologyLevel_t: what two GPUs have in common
NVSWITCH = "switch"  # remote end of an NVLink to an NVSwitch


@dataclass(frozen=True, kw_only=True)
class PcieLink:
    """The PCIe link of a GPU: generation and lanes; None: unknown.

    ``system_generation`` is the maximum of GPU and slot together, ``card_generation`` of the GPU
    itself. An idle GPU lowers its generation.
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
    """An open NVML, or the reason in ``error`` why it cannot be opened. Use as a context manager.

    ``api`` is pynvml, or a fake with the same functions.
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.error is None:
            self.query("nvmlShutdown")
            self.error = "closed"

    def query(self, call: str, *arguments: Any) -> Any:
        """Call an NVML function; returns None on an error."""
        try:
            return getattr(self._api, call)(*arguments)
        except self._api.NVMLError:
            return None

    def driver_version(self) -> str | None:
        return None if self.error else _text(self.query("nvmlSystemGetDriverVersion"))

    def cards(self, visible: str | None = None) -> tuple[NvmlDevice, ...]:
        """Return the GPUs in CUDA's order that ``CUDA_VISIBLE_DEVICES`` = ``visible`` shows.

        None shows all. Entries are indices, UUIDs or unambiguous prefixes of UUIDs; the first
        invalid entry hides itself and all that follow (CUDA C++ Programming Guide, environment
        variables). Indices are in PCI bus order, which is CUDA's order if all GPUs are of one
        kind or CUDA_DEVICE_ORDER is PCI_BUS_ID.
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

    def _query(self, call: str, *arguments: Any) -> Any:
        return self._nvml.query(call, self.handle, *arguments)

    def _field(self, call: str, field: str) -> int | None:
        answer = self._query(call)
        return None if answer is None else int(getattr(answer, field))

    def _scaled(self, call: str, *arguments: Any, scale: float) -> float | None:
        answer = self._query(call, *arguments)
        return None if answer is None else float(answer) * scale

    @functools.cached_property
    def name(self) -> str | None:
        return _text(self._query("nvmlDeviceGetName"))

    @functools.cached_property
    def uuid(self) -> str | None:
        return _text(self._query("nvmlDeviceGetUUID"))

    @functools.cached_property
    def bus_id(self) -> str | None:
        return _address(self._query("nvmlDeviceGetPciInfo"))

    def memory_bytes(self) -> int | None:
        return self._field("nvmlDeviceGetMemoryInfo", "total")

    def memory_used_bytes(self) -> int | None:
        """Return the memory in use by all processes and the driver."""
        return self._field("nvmlDeviceGetMemoryInfo", "used")

    def read_counters(self) -> dict[str, float | None]:
        """Return the fast counters by column: all but PCIe traffic and processes."""
        reasons = self._query("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._query("nvmlDeviceGetCurrentClocksThrottleReasons")
        return {
            telemetry_csv.UTILISATION: self._field("nvmlDeviceGetUtilizationRates", "gpu"),
            telemetry_csv.MEMORY_USED: self.memory_used_bytes(),
            telemetry_csv.POWER: self._scaled("nvmlDeviceGetPowerUsage", scale=1e-3),
            telemetry_csv.TEMPERATURE: self._query("nvmlDeviceGetTemperature", _ON_GPU),
            telemetry_csv.SM_CLOCK: self._query("nvmlDeviceGetClockInfo", _SM),
            telemetry_csv.THROTTLE_REASONS: reasons,
            telemetry_csv.ENERGY: self._scaled("nvmlDeviceGetTotalEnergyConsumption", scale=1e-3),
        }

    def pcie_traffic(self) -> dict[str, float | None]:
        """Return PCIe bytes per second by column. NVML counts for 20 ms in each of two calls."""
        call = "nvmlDeviceGetPcieThroughput"
        return {
            # KB/s, taken as 1,000 bytes
            telemetry_csv.PCIE_RX: self._scaled(call, _RECEIVED, scale=1e3),
            telemetry_csv.PCIE_TX: self._scaled(call, _TRANSMITTED, scale=1e3),
        }

    def compute_pids(self) -> tuple[int, ...] | None:
        """Return the processes with a compute context on the GPU.

        In a container the ids may be the host's, or the list may be empty.
        """
        found = self._query("nvmlDeviceGetComputeRunningProcesses")
        return None if found is None else tuple(int(process.pid) for process in found)

    def has_mig_instances(self) -> bool:
        modes = self._query("nvmlDeviceGetMigMode")
        return modes is not None and modes[0] == 1

    def pcie_link(self) -> PcieLink:
        return PcieLink(
            generation=self._query("nvmlDeviceGetCurrPcieLinkGeneration"),
            width=self._query("nvmlDeviceGetCurrPcieLinkWidth"),
            system_generation=self._query("nvmlDeviceGetMaxPcieLinkGeneration"),
            card_generation=self._query("nvmlDeviceGetGpuMaxPcieLinkGeneration"),
            max_width=self._query("nvmlDeviceGetMaxPcieLinkWidth"),
        )

    @functools.cached_property
    def nvlink_peers(self) -> tuple[str, ...]:
        """The remote end of each active NVLink: a PCI address, or ``switch``."""
        state = "nvmlDeviceGetNvLinkState"
        active = [link for link in range(_MOST_NVLINKS) if self._query(state, link) == 1]
        ends = [self._nvlink_end(link) for link in active]
        return tuple(end for end in ends if end is not None)

    def _nvlink_end(self, link: int) -> str | None:
        if self._query("nvmlDeviceGetNvLinkRemoteDeviceType", link) == _SWITCH_TYPE:
            return NVSWITCH
        return _address(self._query("nvmlDeviceGetNvLinkRemotePciInfo", link))

    def pair_with(self, other: NvmlDevice) -> NvmlDevicePair:
        return NvmlDevicePair(lambda call, *rest: self._query(call, other.handle, *rest))


class NvmlDevicePair:
    """How two GPUs are connected. ``query`` calls an NVML function of both."""

    def __init__(self, query: Callable[..., Any]) -> None:
        self._query = query

    def p2p_status(self, what: int) -> int | None:
        """Return the ``nvmlGpuP2PStatus_t`` of a capability such as ``P2P_READ``; 0 is ok."""
        status: int | None = self._query("nvmlDeviceGetP2PStatus", what)
        return status

    def topology_level(self) -> int | None:
        """Return the ``nvmlGpuTopologyLevel_t`` of the GPUs; see ``TOPOLOGY_LEVELS``."""
        level: int | None = self._query("nvmlDeviceGetTopologyCommonAncestor")
        return level


def _text(answer: Any) -> str | None:
    return None if answer is None else str(answer)


def _address(pci: Any) -> str | None:
    return None if pci is None else f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
