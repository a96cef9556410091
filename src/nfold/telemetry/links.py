"""How the GPUs of a machine reach each other. Pure, over what the cards say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from nfold.machine import GpuLink
from nfold.telemetry.nvml import (
    NVSWITCH,
    P2P_NVLINK,
    P2P_OK,
    P2P_READ,
    P2P_REFUSALS,
    TOPOLOGY_LEVELS,
    NvmlDevice,
)


def find_gpu_links(cards: Sequence[NvmlDevice]) -> tuple[GpuLink, ...]:
    """One link per pair of cards, by their places in ``cards``."""
    pairs = combinations(range(len(cards)), 2)
    return tuple(
        classify_link(first, second, cards[first], cards[second]) for first, second in pairs
    )


def classify_link(first: int, second: int, a: NvmlDevice, b: NvmlDevice) -> GpuLink:
    """``none`` where peer-to-peer copies are refused, else ``nvlink``, else ``pcie``.

    Without peer-to-peer, a transfer goes through the host's memory, whatever cable there is.
    """
    detail = _nvlinks(a, b)
    level = a.topology_level(b)
    common = "" if level is None else TOPOLOGY_LEVELS.get(level, "")
    status = a.p2p_status(b, P2P_READ)
    if status in P2P_REFUSALS:
        parts = [f"P2P: {P2P_REFUSALS[status]}", detail, common]
        return GpuLink(
            first=first, second=second, kind="none", detail=", ".join(filter(None, parts))
        )
    if detail or a.p2p_status(b, P2P_NVLINK) == P2P_OK:
        return GpuLink(first=first, second=second, kind="nvlink", detail=detail)
    return GpuLink(first=first, second=second, kind="pcie", detail=common)


def _nvlinks(a: NvmlDevice, b: NvmlDevice) -> str:
    """The NVLinks between two cards in words; both may go to the same switches instead."""
    direct = a.nvlink_peers.count(b.bus_id) if b.bus_id else 0
    if direct:
        return f"{direct} links"
    switched = min(a.nvlink_peers.count(NVSWITCH), b.nvlink_peers.count(NVSWITCH))
    return f"{switched} links through NVSwitch" if switched else ""
