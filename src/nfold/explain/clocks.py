"""Whether a slow device has a slow clock: that of all, while none waits for another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nfold.measurement import Measurement
from nfold.stats import median

LEAST = 2
"""Looks at every device: one may meet any moment."""
PART = 0.5
"""Of the time by which a device is slow: a clock that explains less of it is not its reason."""


@dataclass(frozen=True)
class Clock:
    """Of a GPU's multiprocessors in MHz, and what held it back; nothing: no card said so."""

    mhz: float
    held: str = ""


def clocks(found: Iterable[Measurement], devices: int) -> tuple[Clock, ...]:
    """Of every device while no rank waits for another; empty where some were not looked at.

    A device that waits computes less, needs less power, and so has a quicker clock: only ranks
    that exchange nothing are alike.
    """
    said: dict[int, list[Clock]] = {}
    for one in found:
        out = one.ablation
        if out is None or out.coupled or len(one.ranks) != devices:
            continue
        for rank in one.ranks:
            device = out.device_of(rank.rank, rank.rank)
            looks = (Clock(w.clock_mhz, w.clock_held) for w in rank.windows if w.clock_mhz)
            said.setdefault(device, []).extend(looks)
    each = [said.get(device, []) for device in range(devices)]
    if devices < 2 or any(len(looks) < LEAST for looks in each):
        return ()
    return tuple(_usual(looks) for looks in each)


def _usual(looks: Sequence[Clock]) -> Clock:
    held, _ = Counter(look.held for look in looks).most_common(1)[0]
    return Clock(median([look.mhz for look in looks]), held)


def why_slow(known: Sequence[Clock], device: int, times: float) -> str | None:
    """What is told of a device whose steps are so many times as long as those of the others.

    None where its clock does not explain it.
    """
    if device >= len(known):
        return None
    own, others = known[device], median([c.mhz for at, c in enumerate(known) if at != device])
    if others / own.mhz - 1 < PART * (times - 1):
        return None
    held = f", {own.held}" if own.held else ""
    clock = f"its clock is at {own.mhz:,.0f} MHz{held}, that of the others at {others:,.0f}"
    return f"{clock}: look at its cooling and its power limit, or leave it out"
