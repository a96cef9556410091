"""What measurements mean: one cause, what it costs, and what is known beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nfold.core.format import format_parenthesized_range, format_ratio_interval
from nfold.core.measurement import Caveat
from nfold.core.plan import Plan
from nfold.core.serialization import JSON_SCHEMA_VERSION, serialize
from nfold.core.stats import Interval
from nfold.explain.result.account import Change, StepAccount, TrialSummary

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


REMOVABLE_CAUSES = ("imbalance", "input", "single-process", "storage", "undivided-work")
"""Causes that can go as a whole: while there is one, devices that are slower than one may help."""


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
    one_device_rows: tuple[Finding, ...]
    interactions: tuple[Interaction, ...]
    not_significant_ms: Interval
    not_attributed_ms: Interval
    training_errors: tuple[str, ...] = ()
    caveats: tuple[Caveat, ...] = ()
    unmeasured: tuple[tuple[str, str], ...] = ()
    break_even_batch: BreakEvenBatch | None = None
    parallelism: str = ""
    headline: str = ""
    lower_bound: LowerBound | None = None
    device_bound: Speed | None = None
    account: StepAccount | None = None
    changes: tuple[Change, ...] = ()
    trials: tuple[TrialSummary, ...] = ()
    not_applicable: tuple[str, ...] = ()
    uses_one_device: bool = False

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
    def goal_label(self) -> str:
        """``2-fold``, or of one device ``compute alone``."""
        return f"{self.devices}-fold" if self.devices > 1 else "compute alone"

    @property
    def significant(self) -> tuple[Finding, ...]:
        """A row of each cause, the one of N devices if it has two; the largest whole cost first."""
        found = {row.cause: row for row in (*self.one_device_rows, *self.rows) if row.significant}
        return tuple(sorted(found.values(), key=lambda row: -row.total_ms.value))

    @property
    def devices_cannot_help(self) -> bool:
        """Whether N devices are slower than one, and no change is known that makes them faster."""
        if (
            self.break_even_batch is None
            or self.break_even_batch.devices_help
            or self.may_miss_causes
        ):
            return False
        if any(change.measured and _is_gain(change.factor) for change in self.changes):
            return False
        fault = bool(self.significant) and self.significant[0].cause in REMOVABLE_CAUSES
        return not fault and not any(_makes_faster(row) for row in self.rows)

    @property
    def may_miss_causes(self) -> bool:
        """Whether something is missing that is in no row, and there was no time for all causes."""
        return bool(self.skipped_causes) and self.is_time_missing(self.not_attributed_ms)

    @property
    def skipped_causes(self) -> tuple[str, ...]:
        """The causes that there was no time for."""
        return tuple(cause for cause, reason in self.unmeasured if reason == NOT_ENOUGH_TIME)

    def fix_is_slower(self, row: Finding) -> bool:
        """Whether what a row's change costs is more than what it wins."""
        now, gain = self.speedup.value if row in self.rows else 1.0, row.predicted_speedup
        return gain is not None and gain.value < now

    def is_time_missing(self, missing_ms: Interval) -> bool:
        """Whether so much is missing for sure. To say so takes less than to name a cause for it."""
        least = MIN_STEP_FRACTION * self.n_devices.step_ms.value
        return missing_ms.low is not None and missing_ms.low > 0 and missing_ms.value > least

    def to_json(self) -> dict[str, Any]:
        """The versioned object that ``nfold explain --json`` prints."""
        return {
            "schema": JSON_SCHEMA_VERSION,
            "target": self.target,
            "plan": self.plan.to_dict(),
            "devices": self.devices,
            "one_device": serialize(self.one_device),
            "n_devices": serialize(self.n_devices),
            "speedup": serialize(self.speedup),
            "device_bound": serialize(self.device_bound),
            "budget": [row.to_json() for row in self.rows],
            "single_device_budget": [row.to_json() for row in self.one_device_rows],
            "named": [row.cause for row in self.significant],
            "interactions": [one.to_json() for one in self.interactions],
            "others_ms": serialize(self.not_significant_ms),
            "unexplained_ms": serialize(self.not_attributed_ms),
            "at_least": self.lower_bound.to_json() if self.lower_bound else None,
            "wrong": list(self.training_errors),
            "account": serialize(self.account),
            "changes": [change.to_json() for change in self.changes],
            "warnings": [serialize(doubt) for doubt in self._all_caveats()],
        }

    def _all_caveats(self) -> list[Caveat]:
        limit = (
            [("cannot_help", " ".join(explain_no_speedup(self)))]
            if self.devices_cannot_help
            else []
        )
        told = limit + [(f"untested_{cause}", reason) for cause, reason in self.unmeasured]
        first = [Caveat(kind="headline", text=self.headline)] if self.headline else []
        return [*first, *self.caveats, *(Caveat(kind=kind, text=text) for kind, text in told)]


def _is_gain(factor: Interval | None) -> bool:
    return factor is not None and (factor.low or factor.value) > 1


def _makes_faster(row: Finding) -> bool:
    without = row.predicted_speedup
    return row.significant and row.fix_measured and without is not None and (without.low or 0.0) > 1


def explain_no_speedup(budget: Budget) -> list[str]:
    """That N devices are slower than one, from which batch on they would not be, what to do."""
    assert budget.break_even_batch is not None
    limit, n, batch = budget.break_even_batch, budget.devices, budget.plan.batch
    found = "From which batch on they do was not measured; next: a larger --budget."
    if limit.evidence:
        found = f"By the measured steps no batch makes {n} devices faster."
    if limit.batch is not None:
        about = f"{limit.batch.value:,.0f} on{format_parenthesized_range(limit.batch, '{:,.0f}')}"
        found = f"They do from a batch of about {about}."
    return [
        f"{n} devices cannot help at batch {batch}: they are {format_ratio_interval(budget.speedup)} as fast as "
        "one.",
        found,
        f"Train on one device, at {budget.one_device.samples_per_s.value:,.0f} samples/s, or "
        f"raise {'its batch' if budget.parallelism else '--batch'}.",
    ]
