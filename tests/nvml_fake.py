"""A stand-in for pynvml: made-up cards that refuse some questions, or are lost in mid-run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """What every call of a library that says no raises."""


@dataclass
class FakeCard:
    """One made-up card. Names in ``refuses`` (without nvmlDeviceGet) are not supported."""

    index: int
    refuses: set[str] = field(default_factory=set)
    pids: list[int] = field(default_factory=list)
    nvlinks: list[str] = field(default_factory=list)
    p2p: int = 0
    nvlink_p2p: int = 5
    ancestor: int = 10
    width: int = 16
    reasons: int = 0
    mig: int = 0
    joules: float = 1000.0

    def answer(self, what: str, arguments: tuple[Any, ...]) -> Any:
        if what in self.refuses:
            raise NVMLError("Not Supported")
        if what.startswith("NvLink"):
            return self._nvlink(what, arguments[0])
        found = ANSWERS[what]
        return found(self, *arguments) if callable(found) else found

    def _nvlink(self, what: str, link: int) -> Any:
        if link >= len(self.nvlinks):
            raise NVMLError("Invalid Argument")
        end = self.nvlinks[link]
        if what == "NvLinkState":
            return int(bool(end))
        if what == "NvLinkRemoteDeviceType":
            return 2 if end == "switch" else 0
        return pci(int(end))

    def energy(self) -> int:
        self.joules += 50.0
        return int(1000 * self.joules)

    def p2p_status(self, other: FakeCard, what: int) -> int:
        return self.nvlink_p2p if what == 2 else self.p2p


def pci(index: int) -> SimpleNamespace:
    return SimpleNamespace(domain=0, bus=0x10 + index, device=0)


ANSWERS: dict[str, int | str | Callable[..., Any]] = {
    "Name": "NVIDIA Made-up",
    "UUID": lambda card: f"GPU-{card.index}{card.index}aa-bb",
    "PciInfo": lambda card: pci(card.index),
    "MemoryInfo": lambda card: SimpleNamespace(total=80 * 2**30, used=2**30 * (card.index + 1)),
    "UtilizationRates": lambda card: SimpleNamespace(gpu=90 + card.index, memory=20),
    "PowerUsage": 300_000,
    "Temperature": lambda card, sensor: 50 + sensor,
    "ClockInfo": lambda card, clock: 1980 if clock == 1 else 1,
    "CurrentClocksEventReasons": lambda card: card.reasons,
    "CurrentClocksThrottleReasons": lambda card: card.reasons | 0x2,
    "TotalEnergyConsumption": lambda card: card.energy(),
    "PcieThroughput": lambda card, counter: 1000 if counter == 0 else 2000,
    "ComputeRunningProcesses": lambda card: [SimpleNamespace(pid=pid) for pid in card.pids],
    "MigMode": lambda card: [card.mig, card.mig],
    "CurrPcieLinkGeneration": 1,
    "CurrPcieLinkWidth": lambda card: card.width,
    "MaxPcieLinkGeneration": 4,
    "GpuMaxPcieLinkGeneration": 4,
    "MaxPcieLinkWidth": 16,
    "P2PStatus": lambda card, other, what: card.p2p_status(other, what),
    "TopologyCommonAncestor": lambda card, other: card.ancestor,
}


class FakeNvml:
    """Acts as the pynvml module. After ``lost_after`` device questions, the driver is gone."""

    NVMLError = NVMLError

    def __init__(
        self, cards: list[FakeCard], absent: str = "", lost_after: int | None = None
    ) -> None:
        self.cards = cards
        self.absent = absent
        self.left = lost_after
        self.open = False

    def nvmlInit(self) -> None:  # noqa: N802
        if self.absent:
            raise NVMLError(self.absent)
        self.open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open = False

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "600.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeCard:  # noqa: N802
        if uuid != "MIG-77":
            raise NVMLError("Not Found")
        return self.cards[-1]

    def __getattr__(self, call: str) -> Callable[..., Any]:
        what = call.removeprefix("nvmlDeviceGet")
        if what not in ANSWERS and not what.startswith("NvLink"):
            raise AttributeError(call)
        return lambda card, *arguments: self._answer(card, what, arguments)

    def _answer(self, card: FakeCard, what: str, arguments: tuple[Any, ...]) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise NVMLError("GPU is lost")
        return card.answer(what, arguments)
