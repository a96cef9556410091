"""Whether a slow device has a slow clock: that of all, while none waits for another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nfold.measurement import Measurement
from nfold.stats import median

MIN_SAMPLES = 2
"""Looks at every device: one may meet any moment."""
EXPLAINED_FRACTION = 0.5
"""Of the time by which a device is slow: a clock that explains less of it is not its reason."""


@dataclass(frozen=True)
class GpuClockRate:
    """Of a GPU's multiprocessors in MHz, and what held it back; nothing: no card said so."""

    mhz: float
    throttle_reason: str = ""


def gpu_clock_rates(measurements: Iterable[Measurement], devices: int) -> tuple[GpuClockRate, ...]:
    """Of every device while no rank waits for another; empty where some were not looked at.

    A device that waits computes less, needs less power, and so has a quicker clock: only ranks
    that exchange nothing are alike.
    """
    said: dict[int, list[GpuClockRate]] = {}
    for one in measurements:
        out = one.variant
        if out is None or out.ranks_synchronize or len(one.ranks) != devices:
            continue
        for rank in one.ranks:
            device = out.device_of(rank.rank, rank.rank)
            looks = (
                GpuClockRate(w.clock_mhz, w.throttle_reason) for w in rank.windows if w.clock_mhz
            )
            said.setdefault(device, []).extend(looks)
    each = [said.get(device, []) for device in range(devices)]
    if devices < 2 or any(len(looks) < MIN_SAMPLES for looks in each):
        return ()
    return tuple(_typical_clock_rate(looks) for looks in each)


def _typical_clock_rate(looks: Sequence[GpuClockRate]) -> GpuClockRate:
    held, _ = Counter(look.throttle_reason for look in looks).most_common(1)[0]
    return GpuClockRate(median([look.mhz for look in looks]), held)


def slow_clock_advice(rates: Sequence[GpuClockRate], device: int, slowdown: float) -> str | None:
    """What is told of a device whose steps are so many times as long as those of the others.

    None where its clock does not explain it.
    """
    if device >= len(rates):
        return None
    own, others = rates[device], median([c.mhz for at, c in enumerate(rates) if at != device])
    if others / own.mhz - 1 < EXPLAINED_FRACTION * (slowdown - 1):
        return None
    held = f", {own.throttle_reason}" if own.throttle_reason else ""
    clock = f"its clock is at {own.mhz:,.0f} MHz{held}, that of the others at {others:,.0f}"
    return f"{clock}: look at its cooling and its power limit, or leave it out"
