"""The N-fold budget: where the rest of N-fold went, and what that says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nfold.amounts import format_parenthesized_range, format_ratio_interval
from nfold.finding import (
    MIN_STEP_FRACTION,
    NOT_ENOUGH_TIME,
    BreakEvenBatch,
    Finding,
    Interaction,
    LowerBound,
    Speed,
)
from nfold.measurement import Caveat
from nfold.plain import serialize
from nfold.plan import Plan
from nfold.stats import Interval
from nfold.summary import JSON_SCHEMA_VERSION

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
            "warnings": [serialize(doubt) for doubt in self._all_caveats()],
        }

    def _all_caveats(self) -> list[Caveat]:
        """The warnings, with what was not tested and whether the devices can help at all."""
        limit = (
            [("cannot_help", " ".join(explain_no_speedup(self)))]
            if self.devices_cannot_help
            else []
        )
        told = limit + [(f"untested_{cause}", reason) for cause, reason in self.unmeasured]
        first = [Caveat(kind="headline", text=self.headline)] if self.headline else []
        return [*first, *self.caveats, *(Caveat(kind=kind, text=text) for kind, text in told)]


def _makes_faster(row: Finding) -> bool:
    """Whether N devices were measured to beat one without this cause."""
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
