"""What the windows of a run say: rates, ratios round by round, efficiency, as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fleet import Arm
from rounds import Window

from nfold.core.serialization import serialize
from nfold.core.stats import Interval, bootstrap, paired_ratio, ratio_of_grouped

Rates = dict[int, float]
"""Samples per second of one arm, by round."""


def rates_of(windows: Sequence[Window], arm: str) -> Rates:
    """An arm's rate in every round that it finished."""
    return {window.round: window.rate for window in windows if window.arm == arm}


def ratio(above: Rates, below: Rates) -> Interval | None:
    """One arm's rate over another's, in the rounds that both finished; None where none is."""
    both = sorted(set(above) & set(below))
    if not both:
        return None
    return paired_ratio([above[r] for r in both], [below[r] for r in both])


def efficiency(many: Rates, one: Rates, devices: int) -> Interval | None:
    """An arm's rate on ``devices`` over so many times its rate on one, in a run of its own."""
    if not (many and one):
        return None
    found = ratio_of_grouped([list(many.values())], [list(one.values())])
    bounds = (found.value, found.low, found.high)
    return Interval(*(None if bound is None else bound / devices for bound in bounds))  # type: ignore[arg-type]


def summary(arms: Sequence[Arm], windows: Sequence[Window], devices: int) -> dict[str, Any]:
    """One run as plain values: every arm's state, every raw window."""
    return {
        "devices": devices,
        "arms": [_arm(arm) for arm in arms],
        "windows": [serialize(window) for window in windows],
    }


def _arm(arm: Arm) -> dict[str, Any]:
    return {
        "name": arm.spec.name,
        "processes": arm.spec.processes(arm.work.devices),
        "devices_driven": arm.spec.driven(arm.work.devices),
        "batch": arm.work.batch_of(arm.spec),
        "error": arm.error,
        "ready": arm.ready,
    }


def table(arms: Sequence[Arm], windows: Sequence[Window], baselines: Sequence[str]) -> str:
    """One line an arm: images/s, its ratio to every baseline, memory, first step."""
    rates = {arm.spec.name: rates_of(windows, arm.spec.name) for arm in arms}
    named = [f"/ {name}" for name in baselines]
    rows = [["arm", "images/s", *named, "peak GiB", "first step s", ""]]
    for arm in arms:
        own = rates[arm.spec.name]
        rows.append(
            [
                arm.spec.name,
                shown(bootstrap(list(own.values())) if own else None, ",.0f"),
                *(shown(ratio(own, rates[name]), ".3f") for name in baselines),
                _most(windows, arm.spec.name),
                f"{max(r['first_step_s'] for r in arm.ready):.1f}" if arm.ready else "",
                _remark(arm, windows),
            ]
        )
    return aligned(rows)


def efficiencies(runs: Sequence[tuple[int, Sequence[Window]]], names: Sequence[str]) -> str:
    """A table of every arm's efficiency; empty where no run has one device or none several."""
    one = next((windows for devices, windows in runs if devices == 1), ())
    several = [(devices, windows) for devices, windows in runs if devices > 1]
    rows = [["efficiency", *(str(devices) for devices, _ in several)]]
    for name in names:
        first = rates_of(one, name)
        found = [efficiency(rates_of(windows, name), first, n) for n, windows in several]
        rows.append([name, *(shown(interval, ".3f") for interval in found)])
    return aligned(rows) if several and one else ""


def shown(interval: Interval | None, form: str) -> str:
    """For example ``1.042 (1.036–1.049)``."""
    if interval is None:
        return "–"
    if interval.low is None or interval.high is None:
        return format(interval.value, form)
    return f"{interval.value:{form}} ({interval.low:{form}}–{interval.high:{form}})"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _most(windows: Sequence[Window], arm: str) -> str:
    peaks = [window.peak_memory_bytes for window in windows if window.arm == arm]
    return f"{max(peaks) / 2**30:.2f}" if peaks else ""


def _remark(arm: Arm, windows: Sequence[Window]) -> str:
    """Why the numbers of an arm are none, or are not to be trusted."""
    if arm.error:
        return f"failed: {arm.error}"
    finite = all(math.isfinite(window.loss) for window in windows if window.arm == arm.spec.name)
    return "" if finite else "its loss is not finite"
