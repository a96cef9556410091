"""What the rates of Inception's arms say: ratios, efficiencies, and what binds. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from results import aligned, shown

from nfold.core.input_rates import ImageRate
from nfold.core.stats import Interval, bootstrap, ratio_of_grouped

PLACEMENTS = ("augment", "decode", "cache")
"""The arms among which the best placement is looked for."""
Rates = Mapping[tuple[str, int], Sequence[float]]
"""Images/s of every window, by arm and devices."""
NEAR = 0.95
"""A rate this near to a bound is bound by it."""


def best_of(rates: Rates) -> str:
    """The fastest placement on one device; without any measured there, ``augment``."""
    one = {name: median(rates[name, 1]) for name in PLACEMENTS if rates.get((name, 1))}
    return max(one, key=one.__getitem__) if one else "augment"


def table(rates: Rates, batch: int) -> str:
    """A line for each arm and number of devices."""
    rows = [["arm", "devices", "images/s", "per device", "s/batch"]]
    for (name, devices), found in rates.items():
        rate = bootstrap(list(found))
        step = devices * batch / rate.value
        rows.append(
            [name, str(devices), shown(rate, ",.0f"), f"{rate.value / devices:,.0f}", f"{step:.3f}"]
        )
    return aligned(rows)


def ratios(rates: Rates) -> list[str]:
    """The best placement against everything on the CPU, itself on one device, and careful."""
    best, lines = best_of(rates), []
    for devices in sorted({devices for _, devices in rates}):
        own = rates.get((best, devices))
        if not own:
            continue
        for other in ("cpu", "careful"):
            if rates.get((other, devices)):
                found = _ratio(own, rates[other, devices])
                lines.append(f"{best} / {other} on {devices}: {shown(found, '.3f')}")
        if devices > 1 and rates.get((best, 1)):
            found = _ratio(own, rates[best, 1])
            parts = Interval(*(None if x is None else x / devices for x in _bounds(found)))  # type: ignore[arg-type]
            lines.append(f"efficiency of {best} on {devices}: {shown(parts, '.3f')}")
    return lines


def _ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    return ratio_of_grouped([list(above)], [list(below)])


def _bounds(found: Interval) -> tuple[float, float | None, float | None]:
    return found.value, found.low, found.high


def binding(
    rates: Rates, decodes: ImageRate, finishes: ImageRate, nvjpeg: ImageRate | None, cores: int
) -> str:
    """What binds each placement on one device, of what was measured alone."""
    bounds = {
        "cpu": {f"{cores} cores that decode and distort": cores * finishes.value},
        "augment": {f"{cores} cores that decode": cores * decodes.value},
        "decode": {"nvJPEG": nvjpeg.value} if nvjpeg else {},
        "cache": {},
    }
    alone = {"copies and canvases": "replayed", "the model alone": "model"}
    common = {said: median(rates[name, 1]) for said, name in alone.items() if rates.get((name, 1))}
    lines = [f"a core decodes {decodes} and decodes and distorts {finishes}, all at work"]
    lines += [f"nvJPEG on one GPU decodes {nvjpeg}"] if nvjpeg else []
    for name, own in bounds.items():
        limits = own | common
        if rates.get((name, 1)) and limits:
            lines.append(_bound(name, median(rates[name, 1]), limits))
    return "\n".join(lines)


def _bound(name: str, rate: float, limits: Mapping[str, float]) -> str:
    """The lowest limit and how near the rate comes to it."""
    lowest = min(limits, key=limits.__getitem__)
    part = rate / limits[lowest]
    reached = "bound by" if part >= NEAR else "below every limit, the lowest is"
    each = ", ".join(f"{said} {limit:,.0f}" for said, limit in limits.items())
    return f"{name} on 1: {rate:,.0f} images/s, {part:.2f} of {lowest}: {reached} it ({each})"
