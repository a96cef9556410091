"""What measurements mean: one cause, what it costs, and what is known beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nfold.plain import serialize
from nfold.stats import Interval

MIN_STEP_FRACTION = 0.02
"""The part of a step below which no row is named a cause, whatever its interval says."""
INTERVAL_MARGIN = 2.5
"""So many times as wide an interval must still exclude 0: a table has a dozen rows, and one in
twenty healthy ones lies outside its own interval."""
NOT_ENOUGH_TIME = "no time was left; next: a larger --budget"
CAUSE_DESCRIPTIONS: dict[str, str] = {
    "link": "gradient bytes that compute does not hide",
    "network": "gradient bytes between hosts",
    "synchronization": "exchanging at all: wrapper, latency, waiting points",
    "single-process": "one process drives all devices",
    "input": "waiting for samples from the host",
    "storage": "waiting for samples from the disk",
    "threads": "processes contend for the host",
    "epoch-boundary": "epoch ends, and what is done between steps",
    "imbalance": "one rank slower than the others",
    "undivided-work": "devices repeat each other's work",
    "launch-bound": "work per step that does not shrink with the batch",
    "layout": "the order of axes in memory",
    "copies": "copies from host to device",
    "memory": "too little device memory",
}
"""Every cause by its stable identifier, in a few words."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row: what a cause costs in milliseconds a step, what proves it, what would remove it.

    ``evidence`` are ids of measurements. ``named``: the value is above ``FLOOR`` of the step, and
    its interval or what a measured fix gains lies well above 0. ``predicted_speedup`` is after the
    fix, None without one; ``predicted_samples_per_s`` is the rate of N devices then, and
    ``bound_samples_per_s`` that without any of the cause, what one device loses to it too.
    ``whole_ms`` is all that a step on N devices loses to the cause, what one device loses in the
    same way too; None where it was not measured on N. ``proven``: the fix itself was measured;
    ``parts``: what the cost is made of.
    """

    cause: str
    lost_ms: Interval
    predicted_speedup: Interval | None
    fix: str
    evidence: tuple[str, ...]
    significant: bool
    multi_device_total_ms: Interval | None = None
    predicted_samples_per_s: Interval | None = None
    bound_samples_per_s: Interval | None = None
    fix_measured: bool = False
    components: tuple[tuple[str, Interval], ...] = ()

    @property
    def description(self) -> str:
        """The cause in a few words."""
        return CAUSE_DESCRIPTIONS[self.cause]

    @property
    def total_ms(self) -> Interval:
        """The whole cost, as far as it is known."""
        return self.multi_device_total_ms or self.lost_ms

    def to_json(self) -> dict[str, Any]:
        """One entry of ``budget`` in the versioned JSON."""
        return {
            "cause": self.cause,
            "lost_ms": serialize(self.lost_ms),
            "whole_ms": serialize(self.multi_device_total_ms),
            "predicted_speedup": serialize(self.predicted_speedup),
            "predicted_samples_per_s": serialize(self.predicted_samples_per_s),
            "bound_samples_per_s": serialize(self.bound_samples_per_s),
            "fix": self.fix,
            "named": self.significant,
            "proven": self.fix_measured,
            "evidence": list(self.evidence),
        }


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """What lies between two epochs of ``steps`` steps on so many ``devices``, of which a run that
    was ended in it saw ``seconds``, or all that it takes (``whole``), of one device unknown.
    """

    seconds: float
    steps: int
    devices: int
    fix: str
    is_complete: bool = False
    cause: str = "epoch-boundary"

    @property
    def lost_ms(self) -> float:
        """A step's part."""
        return 1e3 * self.seconds / self.steps

    def to_json(self) -> dict[str, Any]:
        """``at_least`` in the versioned JSON."""
        values: dict[str, Any] = serialize(self)
        return {**values, "lost_ms": self.lost_ms}


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """What two causes cost together beyond the sum of what each costs alone.

    Above 0, one hides the other: only without both is the time won. Below 0, they overlap.
    """

    causes: tuple[str, str]
    lost_ms: Interval
    evidence: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """One entry of ``interactions`` in the versioned JSON."""
        values: dict[str, Any] = serialize(self)
        return values


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A rate and the step that it comes from."""

    samples_per_s: Interval
    step_ms: Interval


@dataclass(frozen=True, kw_only=True)
class BreakEvenBatch:
    """From which global batch on N devices beat one, by a line through measured step times.

    ``batch`` is None where they never do, because another sample costs N devices more than one,
    and without ``evidence``, where nobody has measured it.
    """

    devices_help: bool
    batch: Interval | None
    evidence: tuple[str, ...]


def exceeds_noise(loss: Interval, step_ms: float) -> bool:
    """Whether a cost is other than 0, a loss or a gain, and worth a name."""
    if loss.low is None or loss.high is None:
        return False
    side = loss.value - loss.low if loss.value > 0 else loss.high - loss.value
    return abs(loss.value) > max(INTERVAL_MARGIN * side, MIN_STEP_FRACTION * step_ms)
