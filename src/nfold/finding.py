"""What measurements mean: the N-fold budget, its rows, and what it says in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nfold.amounts import bounds, times
from nfold.measurement import Doubt
from nfold.plain import to_plain
from nfold.plan import Plan
from nfold.stats import Interval
from nfold.summary import SCHEMA

FLOOR = 0.02
"""The part of a step below which no row is named a cause, whatever its interval says."""
SURE = 2.5
"""So many times as wide an interval must still exclude 0: a table has a dozen rows, and one in
twenty healthy ones lies outside its own interval."""
NO_TIME = "no time was left; next: a larger --budget"
CAUSES: dict[str, str] = {
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


FAULTS = ("imbalance", "input", "single-process", "storage", "undivided-work")
"""Causes that can go as a whole: while there is one, devices that are slower than one may help."""


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
    named: bool
    whole_ms: Interval | None = None
    predicted_samples_per_s: Interval | None = None
    bound_samples_per_s: Interval | None = None
    proven: bool = False
    parts: tuple[tuple[str, Interval], ...] = ()

    @property
    def what(self) -> str:
        """The cause in a few words."""
        return CAUSES[self.cause]

    @property
    def all_ms(self) -> Interval:
        """The whole cost, as far as it is known."""
        return self.whole_ms or self.lost_ms

    def to_json(self) -> dict[str, Any]:
        """One entry of ``budget`` in the versioned JSON."""
        return {
            "cause": self.cause,
            "lost_ms": to_plain(self.lost_ms),
            "whole_ms": to_plain(self.whole_ms),
            "predicted_speedup": to_plain(self.predicted_speedup),
            "predicted_samples_per_s": to_plain(self.predicted_samples_per_s),
            "bound_samples_per_s": to_plain(self.bound_samples_per_s),
            "fix": self.fix,
            "named": self.named,
            "proven": self.proven,
            "evidence": list(self.evidence),
        }


@dataclass(frozen=True, kw_only=True)
class AtLeast:
    """What lies between two epochs of ``steps`` steps on so many ``devices``, of which a run that
    was ended in it saw ``seconds``, or all that it takes (``whole``), of one device unknown.
    """

    seconds: float
    steps: int
    devices: int
    fix: str
    whole: bool = False
    cause: str = "epoch-boundary"

    @property
    def lost_ms(self) -> float:
        """A step's part."""
        return 1e3 * self.seconds / self.steps

    def to_json(self) -> dict[str, Any]:
        """``at_least`` in the versioned JSON."""
        values: dict[str, Any] = to_plain(self)
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
        values: dict[str, Any] = to_plain(self)
        return values


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A rate and the step that it comes from."""

    samples_per_s: Interval
    step_ms: Interval


@dataclass(frozen=True, kw_only=True)
class BatchLimit:
    """From which global batch on N devices beat one, by a line through measured step times.

    ``batch`` is None where they never do, because another sample costs N devices more than one,
    and without ``evidence``, where nobody has measured it.
    """

    helps: bool
    batch: Interval | None
    evidence: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Where the rest of N-fold went. ``rows`` and ``single`` have the largest cost first.

    ``ideal_ms`` is a step of N-fold speed over the same samples. ``others_ms`` is the sum of the
    rows without a name, ``unexplained_ms`` what is in no row. ``untested`` holds causes with the
    reason why nothing was measured of them. ``way`` is how a script uses its devices, and
    ``headline`` what is to be known before all numbers; both are empty for a workload. ``at_least``
    is what is known of a cause whose run had to be ended. ``device_bound`` is one device with its
    share of the batch that loses nothing of ``single``: where there is one, it has all rows.
    """

    target: str
    plan: Plan
    scaling: Literal["strong", "weak"]
    one_device: Speed
    n_devices: Speed
    ideal_ms: Interval
    speedup: Interval
    rows: tuple[Finding, ...]
    single: tuple[Finding, ...]
    interactions: tuple[Interaction, ...]
    others_ms: Interval
    unexplained_ms: Interval
    wrong: tuple[str, ...] = ()
    warnings: tuple[Doubt, ...] = ()
    untested: tuple[tuple[str, str], ...] = ()
    limit: BatchLimit | None = None
    way: str = ""
    headline: str = ""
    at_least: AtLeast | None = None
    device_bound: Speed | None = None

    @property
    def devices(self) -> int:
        """N."""
        return self.plan.devices or 1

    @property
    def goal_ms(self) -> float:
        """A step of which nothing is lost: at N-fold speed; of one device, its compute alone."""
        bound = self.device_bound if self.devices == 1 else None
        return bound.step_ms.value if bound else self.ideal_ms.value

    @property
    def goal(self) -> str:
        """``2-fold``, or of one device ``compute alone``."""
        return f"{self.devices}-fold" if self.devices > 1 else "compute alone"

    @property
    def named(self) -> tuple[Finding, ...]:
        """A row of each cause, the one of N devices if it has two; the largest whole cost first."""
        found = {row.cause: row for row in (*self.single, *self.rows) if row.named}
        return tuple(sorted(found.values(), key=lambda row: -row.all_ms.value))

    @property
    def cannot_help(self) -> bool:
        """Whether N devices are slower than one, and no change is known that makes them faster."""
        if self.limit is None or self.limit.helps or self.unseen:
            return False
        fault = bool(self.named) and self.named[0].cause in FAULTS
        return not fault and not any(_makes_faster(row) for row in self.rows)

    @property
    def unseen(self) -> bool:
        """Whether something is missing that is in no row, and there was no time for all causes."""
        return bool(self.no_time) and self.misses(self.unexplained_ms)

    @property
    def no_time(self) -> tuple[str, ...]:
        """The causes that there was no time for."""
        return tuple(cause for cause, reason in self.untested if reason == NO_TIME)

    def slows(self, row: Finding) -> bool:
        """Whether what a row's change costs is more than what it wins."""
        now, gain = self.speedup.value if row in self.rows else 1.0, row.predicted_speedup
        return gain is not None and gain.value < now

    def misses(self, rest: Interval) -> bool:
        """Whether so much is missing for sure. To say so takes less than to name a cause for it."""
        least = FLOOR * self.n_devices.step_ms.value
        return rest.low is not None and rest.low > 0 and rest.value > least

    def to_json(self) -> dict[str, Any]:
        """The versioned object that ``nfold explain --json`` prints."""
        return {
            "schema": SCHEMA,
            "target": self.target,
            "plan": self.plan.to_dict(),
            "devices": self.devices,
            "one_device": to_plain(self.one_device),
            "n_devices": to_plain(self.n_devices),
            "speedup": to_plain(self.speedup),
            "device_bound": to_plain(self.device_bound),
            "budget": [row.to_json() for row in self.rows],
            "single_device_budget": [row.to_json() for row in self.single],
            "named": [row.cause for row in self.named],
            "interactions": [one.to_json() for one in self.interactions],
            "others_ms": to_plain(self.others_ms),
            "unexplained_ms": to_plain(self.unexplained_ms),
            "at_least": self.at_least.to_json() if self.at_least else None,
            "wrong": list(self.wrong),
            "warnings": [to_plain(doubt) for doubt in self._told()],
        }

    def _told(self) -> list[Doubt]:
        """The warnings, with what was not tested and whether the devices can help at all."""
        limit = [("cannot_help", " ".join(no_help(self)))] if self.cannot_help else []
        told = limit + [(f"untested_{cause}", reason) for cause, reason in self.untested]
        first = [Doubt(kind="headline", text=self.headline)] if self.headline else []
        return [*first, *self.warnings, *(Doubt(kind=kind, text=text) for kind, text in told)]


def beyond(cost: Interval, step_ms: float) -> bool:
    """Whether a cost is other than 0, a loss or a gain, and worth a name."""
    if cost.low is None or cost.high is None:
        return False
    side = cost.value - cost.low if cost.value > 0 else cost.high - cost.value
    return abs(cost.value) > max(SURE * side, FLOOR * step_ms)


def _makes_faster(row: Finding) -> bool:
    """Whether N devices were measured to beat one without this cause."""
    without = row.predicted_speedup
    return row.named and row.proven and without is not None and (without.low or 0.0) > 1


def no_help(budget: Budget) -> list[str]:
    """That N devices are slower than one, from which batch on they would not be, what to do."""
    assert budget.limit is not None
    limit, n, batch = budget.limit, budget.devices, budget.plan.batch
    found = "From which batch on they do was not measured; next: a larger --budget."
    if limit.evidence:
        found = f"By the measured steps no batch makes {n} devices faster."
    if limit.batch is not None:
        about = f"{limit.batch.value:,.0f} on{bounds(limit.batch, '{:,.0f}')}"
        found = f"They do from a batch of about {about}."
    return [
        f"{n} devices cannot help at batch {batch}: they are {times(budget.speedup)} as fast as "
        "one.",
        found,
        f"Train on one device, at {budget.one_device.samples_per_s.value:,.0f} samples/s, or "
        f"raise {'its batch' if budget.way else '--batch'}.",
    ]
