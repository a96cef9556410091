"""The result of an explanation: costs by cause, speeds, caveats."""

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
"""Of a step: a smaller cost is never significant."""
INTERVAL_MARGIN = 2.5
"""An interval this many times as wide must still exclude 0: there are a dozen findings, and one in
twenty healthy ones lies outside its own 95 % interval."""
NOT_ENOUGH_TIME = "no time was left; next: a larger --budget"
CAUSE_DESCRIPTIONS: dict[str, str] = {
    "link": "gradient bytes that compute does not hide",
    "network": "gradient bytes between hosts",
    "synchronization": "wrapper, latency and waiting points of collectives",
    "single-process": "one process drives all devices",
    "input": "waiting for samples from the host",
    "storage": "waiting for samples from the disk",
    "threads": "processes contend for the host",
    "epoch-boundary": "time between epochs, and host work between steps",
    "imbalance": "one rank slower than the others",
    "undivided-work": "devices repeat each other's work",
    "launch-bound": "work per step that does not shrink with the batch",
    "layout": "the order of axes in memory",
    "copies": "copies from host to device",
    "memory": "too little device memory",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a cause costs in milliseconds per step, the measurements that show it, its fix.

    ``lost_ms`` is what N devices lose beyond one, or what one device loses by itself;
    ``multi_device_total_ms`` is everything that a step on N devices loses, None if not measured.
    ``significant``: the cost is above ``MIN_STEP_FRACTION`` of the step and beyond the noise, or a
    measured fix gains more than the noise. ``predicted_speedup`` and ``predicted_samples_per_s``
    are those after the fix, ``bound_samples_per_s`` is the throughput without any of the cause.
    ``fix_measured``: the fix itself was run. ``components`` split the cost. ``evidence`` are ids of
    measurements.
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
        return CAUSE_DESCRIPTIONS[self.cause]

    @property
    def total_ms(self) -> Interval:
        """The whole cost on N devices if known, else the measured part."""
        return self.multi_device_total_ms or self.lost_ms

    def to_json(self) -> dict[str, Any]:
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
    """A lower bound of the time between two epochs of ``steps`` steps on ``devices``.

    It is ``is_complete`` if the whole boundary was measured on N devices, but not on one.
    """

    seconds: float
    steps: int
    devices: int
    fix: str
    is_complete: bool = False
    cause: str = "epoch-boundary"

    @property
    def lost_ms(self) -> float:
        """Milliseconds per step."""
        return 1e3 * self.seconds / self.steps

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        return {**values, "lost_ms": self.lost_ms}


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """What two causes cost together beyond the sum of both.

    Above 0, each hides the other: only removing both gains the time. Below 0, they overlap.
    """

    causes: tuple[str, str]
    lost_ms: Interval
    evidence: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        return values


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A throughput and the step that it comes from."""

    samples_per_s: Interval
    step_ms: Interval


@dataclass(frozen=True, kw_only=True)
class BreakEvenBatch:
    """The global batch from which N devices are faster than one, by lines through measured steps.

    ``batch`` is None if there is none, and without ``evidence`` if it was not measured.
    """

    devices_help: bool
    batch: Interval | None
    evidence: tuple[str, ...]


def exceeds_noise(loss: Interval, step_ms: float) -> bool:
    """Return whether a loss or a gain is different from 0 beyond the noise."""
    if loss.low is None or loss.high is None:
        return False
    side = loss.value - loss.low if loss.value > 0 else loss.high - loss.value
    return abs(loss.value) > max(INTERVAL_MARGIN * side, MIN_STEP_FRACTION * step_ms)


REMOVABLE_CAUSES = ("imbalance", "input", "single-process", "storage", "undivided-work")
"""Causes that can be removed completely: with such a cause, more devices may still help."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The result of one explanation. ``rows`` and ``one_device_rows`` have the largest cost first.

    ``ideal_ms`` is a step at N-fold speed over the same samples. ``not_significant_ms`` is the sum
    of the findings within the noise, ``not_attributed_ms`` the residual. ``unmeasured`` holds causes
    with the reason. ``parallelism`` is how a script uses its devices, ``headline`` are notes to read
    first; both are empty for a workload. ``device_bound`` is one device without its own losses.
    ``account`` divides the step on N devices, ``changes`` are the code to change in the order of
    their cost, ``trials`` every variant with its steps. ``uses_one_device``: the script is one
    process on one device, whatever number was requested.
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
        return self.plan.devices or 1

    @property
    def significant(self) -> tuple[Finding, ...]:
        """The significant finding of each cause, that of N devices if there are two; largest first."""
        found = {row.cause: row for row in (*self.one_device_rows, *self.rows) if row.significant}
        return tuple(sorted(found.values(), key=lambda row: -row.total_ms.value))

    @property
    def devices_cannot_help(self) -> bool:
        """Whether N devices are slower than one, and no change is known to make them faster."""
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
        """Whether a residual is left and the time was too short for some cause."""
        return bool(self.skipped_causes) and self.is_time_missing(self.not_attributed_ms)

    @property
    def skipped_causes(self) -> tuple[str, ...]:
        """The causes that the time was too short for."""
        return tuple(cause for cause, reason in self.unmeasured if reason == NOT_ENOUGH_TIME)

    def is_time_missing(self, missing_ms: Interval) -> bool:
        """Whether this time is above 0. A residual needs less certainty than a cause."""
        least = MIN_STEP_FRACTION * self.n_devices.step_ms.value
        return missing_ms.low is not None and missing_ms.low > 0 and missing_ms.value > least

    def to_json(self) -> dict[str, Any]:
        """Return the versioned object that ``nfold explain --json`` prints."""
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
            "warnings": [serialize(caveat) for caveat in self._all_caveats()],
        }

    def _all_caveats(self) -> list[Caveat]:
        limit = (
            [("cannot_help", " ".join(explain_no_speedup(self)))]
            if self.devices_cannot_help
            else []
        )
        found = limit + [(f"untested_{cause}", reason) for cause, reason in self.unmeasured]
        first = [Caveat(kind="headline", text=self.headline)] if self.headline else []
        return [*first, *self.caveats, *(Caveat(kind=kind, text=text) for kind, text in found)]


def _is_gain(factor: Interval | None) -> bool:
    return factor is not None and (factor.low or factor.value) > 1


def _makes_faster(row: Finding) -> bool:
    without = row.predicted_speedup
    return row.significant and row.fix_measured and without is not None and (without.low or 0.0) > 1


def explain_no_speedup(budget: Budget) -> list[str]:
    """Return that N devices are slower than one, the batch that would change it, the next step."""
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
