"""The report of ``nfold run --watch``: where the time of the steps went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nfold.core.serialization import deserialize
from nfold.core.stats import change_point
from nfold.launch.step_watch import StepWindow, WatchedSteps

MIN_FRACTION = 0.02  # of a step: smaller differences between ranks are not reported


def read_watched_steps(folder: Path) -> list[WatchedSteps]:
    """Return what was seen on every rank that made timed steps."""
    ranks = []
    for file in sorted(folder.glob("watch-*.json")):
        seen = deserialize(WatchedSteps, json.loads(file.read_text()))
        if seen.total.steps:
            ranks.append(seen)
    return ranks


def describe_watched_steps(
    ranks: Sequence[WatchedSteps], explained_ms: float | None = None
) -> list[str]:
    """Return lines about the steps, the conclusion first; ``explained_ms``: a step of an explanation."""
    if not ranks:
        return ["no step was timed: --watch needs more than 10 optimizer steps"]
    slowest = min(ranks, key=lambda rank: _milliseconds(rank.total, rank.total.exchange_s))
    own = slowest.total
    step_ms = _milliseconds(own, own.seconds)
    lines = [f"{own.steps:,} steps of {step_ms:.3g} ms"]
    waits = [_milliseconds(rank.total, rank.total.exchange_s) for rank in ranks]
    if max(waits) - min(waits) > MIN_FRACTION * step_ms:
        lines[0] += (
            f"; the slowest is rank {slowest.rank}: others wait up to "
            f"{max(waits) - min(waits):.3g} ms a step for it"
        )
    parts = {
        "waiting for batches": _milliseconds(own, own.input_s),
        "gradient exchange": min(waits) if len(ranks) > 1 else 0.0,
    }
    parts["computation and the rest"] = step_ms - sum(parts.values())
    shown = [f"{name} {ms:.3g} ms ({ms / step_ms:.0%})" for name, ms in parts.items() if ms > 0]
    lines.append(f"a step of rank {slowest.rank}: {', '.join(shown)}")
    if slowest.pauses:
        paused_s = sum(slowest.pauses)
        lines.append(
            f"{len(slowest.pauses)} pauses between steps (evaluations, checkpoints): {paused_s:.3g} s, "
            f"{paused_s / (paused_s + own.seconds):.0%} of the time"
        )
    if change := change_point([window.seconds / window.steps for window in slowest.windows]):
        lines.append(
            f"steps changed in the course of the run: {1e3 * change.before:.3g} → "
            f"{1e3 * change.after:.3g} ms"
        )
    if explained_ms is not None:
        lines.append(
            f"nfold explain measured {explained_ms:.3g} ms: {_departure(step_ms, explained_ms)}"
        )
    return lines


def _milliseconds(window: StepWindow, seconds: float) -> float:
    return 1e3 * seconds / window.steps


def _departure(step_ms: float, explained_ms: float) -> str:
    ratio = step_ms / explained_ms
    if abs(ratio - 1) < 0.05:
        return "the run is as explained"
    return f"the run is {abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'}"
