"""The N-fold budget: where the rest of N-fold went, and what that says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nfold.amounts import bounds, times
from nfold.finding import FLOOR, NO_TIME, AtLeast, BatchLimit, Finding, Interaction, Speed
from nfold.measurement import Doubt
from nfold.plain import to_plain
from nfold.plan import Plan
from nfold.stats import Interval
from nfold.summary import SCHEMA

FAULTS = ("imbalance", "input", "single-process", "storage", "undivided-work")
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
