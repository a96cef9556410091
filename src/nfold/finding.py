"""What measurements mean: the N-fold budget, its rows, and what it says in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nfold.measurement import UNEXCHANGED, Doubt
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
    "epoch-boundary": "time between epochs",
    "imbalance": "waiting for the slowest rank",
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

    ``evidence`` are ids of measurements. ``named``: the interval lies well above 0 and the value
    above ``FLOOR`` of the step. ``predicted_speedup`` is after the fix, None without one;
    ``proven``: the fix itself was measured. ``parts`` are what the cost is made of.
    """

    cause: str
    lost_ms: Interval
    predicted_speedup: Interval | None
    fix: str
    evidence: tuple[str, ...]
    named: bool
    proven: bool = False
    parts: tuple[tuple[str, Interval], ...] = ()

    @property
    def what(self) -> str:
        """The cause in a few words."""
        return CAUSES[self.cause]

    def to_json(self) -> dict[str, Any]:
        """One entry of ``budget`` in the versioned JSON."""
        return {
            "cause": self.cause,
            "lost_ms": to_plain(self.lost_ms),
            "predicted_speedup": to_plain(self.predicted_speedup),
            "fix": self.fix,
            "evidence": list(self.evidence),
        }


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

    ``ideal_ms`` is a step of N-fold speed over the same samples. ``untested`` holds causes with
    the reason why nothing was measured of them. ``way`` is how a script uses its devices, and
    ``headline`` what is to be known before all numbers; both are empty for a workload.
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
    unexplained_ms: Interval
    wrong: tuple[str, ...] = ()
    warnings: tuple[Doubt, ...] = ()
    untested: tuple[tuple[str, str], ...] = ()
    limit: BatchLimit | None = None
    way: str = ""
    headline: str = ""

    @property
    def devices(self) -> int:
        """N."""
        return self.plan.devices or 1

    @property
    def named(self) -> tuple[Finding, ...]:
        """The rows that are causes, of N devices first."""
        return tuple(row for row in (*self.rows, *self.single) if row.named)

    @property
    def cannot_help(self) -> bool:
        """Whether N devices are slower than one, and no change is known that makes them faster."""
        if self.limit is None or self.limit.helps:
            return False
        fault = bool(self.named) and self.named[0].cause in FAULTS
        return not fault and not any(_makes_faster(row) for row in self.rows)

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
            "budget": [row.to_json() for row in self.rows],
            "single_device_budget": [row.to_json() for row in self.single],
            "interactions": [one.to_json() for one in self.interactions],
            "unexplained_ms": to_plain(self.unexplained_ms),
            "wrong": list(self.wrong),
            "warnings": [to_plain(doubt) for doubt in self._told()],
        }

    def _told(self) -> list[Doubt]:
        """The warnings, with what was not tested and whether the devices can help at all."""
        limit = (("cannot_help", " ".join(sentences(self))),) if self.cannot_help else ()
        untested = ((f"untested_{cause}", reason) for cause, reason in self.untested)
        told = [Doubt(kind=kind, text=text) for kind, text in (*limit, *untested)]
        first = [Doubt(kind="headline", text=self.headline)] if self.headline else []
        return [*first, *self.warnings, *told]


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


def _is_missing(budget: Budget) -> bool:
    """Whether something is unexplained. To say so takes less than to name a cause for it."""
    rest, step_ms = budget.unexplained_ms, budget.n_devices.step_ms.value
    return rest.low is not None and rest.low > 0 and rest.value > FLOOR * step_ms


def sentences(budget: Budget) -> list[str]:
    """What costs most, what to change, what to expect."""
    if any(UNEXCHANGED in text for text in budget.wrong):
        return _unexchanged(budget)
    if budget.limit is not None and budget.cannot_help:
        return _cannot_help(budget, budget.limit)
    left = [cause for cause, reason in budget.untested if reason == NO_TIME]
    if not budget.named and left:
        return [
            f"Nothing that was measured costs more than {FLOOR:.0%} of a step beyond the noise.",
            f"Change nothing yet: there was no time for {', '.join(left)}; next: a larger "
            "--budget, which goes on from here.",
            f"{budget.devices} devices are {_times(budget.speedup)} as fast as one.",
        ]
    if not budget.named and _is_missing(budget):
        part = 100 * budget.unexplained_ms.value / budget.n_devices.step_ms.value
        return [
            f"{milliseconds(budget.unexplained_ms)}, {part:.0f} % of a step, is missing to "
            f"{budget.devices}-fold, and no single cause is above the noise of these runs.",
            "Change nothing yet: measure longer (a larger --budget), with the machine to itself.",
            f"{budget.devices} devices are {_times(budget.speedup)} as fast as one.",
        ]
    if not budget.named:
        return [
            f"No cause costs more than {FLOOR:.0%} of a step beyond the noise.",
            "There is nothing to change.",
            f"{budget.devices} devices are {_times(budget.speedup)} as fast as one.",
        ]
    first = budget.named[0]
    on_n = first in budget.rows
    step = budget.n_devices.step_ms if on_n else budget.one_device.step_ms
    part = 100 * first.lost_ms.value / step.value
    where = f"of a step on {budget.devices} devices" if on_n else "of a step even on one device"
    return [
        f"Most is lost to {first.cause} ({first.what}): {milliseconds(first.lost_ms)}, "
        f"{part:.0f} % {where}.",
        f"Change: {first.fix}.",
        _expectation(budget, first, on_n=on_n),
    ]


def _unexchanged(budget: Budget) -> list[str]:
    return [
        f"The training on {budget.devices} devices is wrong: {'; '.join(budget.wrong)}.",
        "Change that first: DistributedDataParallel, or tell the trainer of all processes.",
        f"{budget.devices} devices are {_times(budget.speedup)} as fast as one, sharing no work.",
    ]


def _expectation(budget: Budget, first: Finding, *, on_n: bool) -> str:
    if first.predicted_speedup is None:
        return "No prediction: what the change gains was not measured."
    how = "as measured with the change" if first.proven else "if the whole cost goes"
    if not on_n:
        return f"Expect one device to be {_times(first.predicted_speedup)} as fast, {how}."
    return (
        f"Expect {_times(first.predicted_speedup)} of one device instead of "
        f"{_times(budget.speedup)}, {how}."
    )


def _cannot_help(budget: Budget, limit: BatchLimit) -> list[str]:
    n, batch = budget.devices, budget.plan.batch
    found = "From which batch on they do was not measured; next: a larger --budget."
    if limit.evidence:
        found = f"By the measured steps no batch makes {n} devices faster."
    if limit.batch is not None:
        bounds = _bounds(limit.batch, "{:,.0f}")
        found = f"They do from a batch of about {limit.batch.value:,.0f} on{bounds}."
    return [
        f"{n} devices cannot help at batch {batch}: they are {_times(budget.speedup)} as fast as "
        "one.",
        found,
        f"Train on one device, at {budget.one_device.samples_per_s.value:,.0f} samples/s, or "
        f"raise {'its batch' if budget.way else '--batch'}.",
    ]


def milliseconds(cost: Interval) -> str:
    """``1.25 ms (1.10 to 1.40)``."""
    return f"{cost.value:.2f} ms{_bounds(cost, '{:.2f}')}"


def _times(ratio: Interval) -> str:
    return f"{ratio.value:.2f} ×{_bounds(ratio, '{:.2f}')}"


def _bounds(interval: Interval, form: str) -> str:
    if interval.low is None or interval.high is None:
        return ""
    return f" ({form.format(interval.low)} to {form.format(interval.high)})"
