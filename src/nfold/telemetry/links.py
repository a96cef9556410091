"""How the GPUs of a machine reach each other. Pure, over what the cards say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from nfold.machine import Link
from nfold.telemetry.nvml import ANCESTORS, P2P_NVLINK, P2P_OK, P2P_READ, P2P_REFUSALS, SWITCH, Card


def links_between(cards: Sequence[Card]) -> tuple[Link, ...]:
    """One link per pair of cards, by their places in ``cards``."""
    pairs = combinations(range(len(cards)), 2)
    return tuple(link_of(first, second, cards[first], cards[second]) for first, second in pairs)


def link_of(first: int, second: int, a: Card, b: Card) -> Link:
    """``none`` where peer-to-peer copies are refused, else ``nvlink``, else ``pcie``.

    Without peer-to-peer, a transfer goes through the host's memory, whatever cable there is.
    """
    detail = _nvlinks(a, b)
    level = a.ancestor(b)
    common = "" if level is None else ANCESTORS.get(level, "")
    status = a.p2p(b, P2P_READ)
    if status in P2P_REFUSALS:
        parts = [f"P2P: {P2P_REFUSALS[status]}", detail, common]
        return Link(first=first, second=second, kind="none", detail=", ".join(filter(None, parts)))
    if detail or a.p2p(b, P2P_NVLINK) == P2P_OK:
        return Link(first=first, second=second, kind="nvlink", detail=detail)
    return Link(first=first, second=second, kind="pcie", detail=common)


def _nvlinks(a: Card, b: Card) -> str:
    """The NVLinks between two cards in words; both may go to the same switches instead."""
    direct = a.nvlink_ends.count(b.bus_id) if b.bus_id else 0
    if direct:
        return f"{direct} links"
    switched = min(a.nvlink_ends.count(SWITCH), b.nvlink_ends.count(SWITCH))
    return f"{switched} links through NVSwitch" if switched else ""
