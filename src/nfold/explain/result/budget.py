"""The result of an explanation: costs by cause, the account of a step, changes, speeds, caveats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nfold.core.format import format_parenthesized_range, format_ratio_interval
from nfold.core.measurement import Caveat
from nfold.core.plan import Plan
from nfold.core.script_profile import FetchLine
from nfold.core.serialization import JSON_SCHEMA_VERSION, serialize
from nfold.core.stats import Interval

MIN_STEP_FRACTION = 0.02
"""Of a step: a smaller cost is never significant."""
SUSPECTED_LOSS_FRACTION = 0.1
"""A loss above this part of a step has its fixes measured, and is likely if the probe run found a
repair of its cause, however wide its interval."""
INTERVAL_MARGIN = 2.5
"""An interval this many times as wide must still exclude 0: there are a dozen findings, and one in
twenty healthy ones lies outside its own 95 % interval."""
LARGER_BUDGET_HINT = "; next: a larger --budget"
"""The end of every reason why something was not measured in the time budget."""
NOT_ENOUGH_TIME = f"no time was left{LARGER_BUDGET_HINT}"
EXCHANGE_REPAIR = "exchange_repair"  # kind of the caveat that an exchange can be repaired
SHARED_CORES = "shared_cores"  # kind of the caveat that all ranks are bound to too few cores


ROW_LABELS: dict[str, str] = {
    "compute": "model compute",
    "data-loader": "data loader",
    "first-epoch": "first epoch only, fills a cache",
    "communication": "gradient communication",
    "synchronization": "wrapper and synchronization",
    "growing-work": "work that grows with devices",
    "copies": "host-to-device copies",
    "launch": "launch overhead",
    "epoch-boundary": "epoch boundary, host work",
    "imbalance": "waiting for slower ranks",
    "threads": "host contention",
    "layout": "memory layout",
    "memory": "memory allocator",
    "recompilation": "recompilation",
    "single-process": "one process for all devices",
    "not-attributed": "not attributed",
}
WAITING, WORKING = "data loader, waiting", "data loader, working"


@dataclass(frozen=True, kw_only=True)
class AccountRow:
    """One cost of a step on all devices, in milliseconds.

    ``one_device_ms`` is the part that one device by itself loses too, None for rows without
    causes. ``parts`` split the row and add up to it. ``causes`` are the ids behind the row. A row
    that is not ``significant`` is likely: its interval excludes 0, but not by the margin that a
    dozen rows demand, or the probe run observed its cause.
    """

    id: str
    ms: Interval
    causes: tuple[str, ...] = ()
    one_device_ms: Interval | None = None
    parts: tuple[tuple[str, Interval], ...] = ()
    significant: bool = True

    @property
    def label(self) -> str:
        return ROW_LABELS[self.id]


@dataclass(frozen=True, kw_only=True)
class StepAccount:
    """Where a step goes. The rows add up to ``step_ms``; the largest certain cost comes first, after
    ``compute``, before ``not-attributed``.

    ``one_device`` is the same account of one device with its share of the batch.
    ``small`` are the rows below the noise, which ``not-attributed`` contains.
    """

    step_ms: Interval
    rows: tuple[AccountRow, ...]
    small: tuple[AccountRow, ...] = ()
    one_device: tuple[AccountRow, ...] = ()

    @property
    def costs(self) -> tuple[AccountRow, ...]:
        """The rows of causes, first those that are certain, largest first."""
        return tuple(row for row in self.rows if row.causes)

    @property
    def not_attributed(self) -> AccountRow:
        return self.rows[-1]


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A measured setting and the step that it gives."""

    value: str
    step_ms: Interval
    samples_per_s: Interval


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of one line, with its gain on the requested devices.

    ``row`` is the id of the account row that it removes. ``location`` is ``train.py:31``, empty
    for a command-line option. ``note`` are other ways and reasons, ``current`` is the present value
    of the setting. ``is_repair``: it may remove the whole cost at the same batch size.
    ``factor`` is the throughput after the change over that of today; None where nobody can predict it.
    ``alternatives`` are measured values of the setting ``varied``, today's included, in their order.
    """

    row: str
    location: str
    code: str
    note: str = ""
    setting: str = ""
    current: str = ""
    measured: bool = False
    is_repair: bool = False
    samples_per_s: Interval | None = None
    factor: Interval | None = None
    varied: str = ""
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrialSummary:
    """The step times of one variant, one per run."""

    label: str
    devices: int
    step_ms: tuple[float, ...]
    ids: tuple[str, ...]


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


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """What two causes cost together beyond the sum of both.

    Above 0, each hides the other: only removing both gains the time. Below 0, they overlap.
    """

    causes: tuple[str, str]
    lost_ms: Interval
    evidence: tuple[str, ...]


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


STARVED_FRACTION = 0.2
"""Input wait, as a part of the step, above which one device is starved."""


@dataclass(frozen=True, kw_only=True)
class SeveralDevices:
    """The effect of more devices on a script that uses one.

    ``input_ms`` is what the input costs one device of ``step_ms``. From ``batch`` samples per step
    on, several devices are faster, if a sample computes for ``sample_ms`` and gradients take
    ``exchange_ms``; None if that was not measured, or if no batch makes them faster.
    """

    input_ms: Interval
    step_ms: Interval
    is_starved: bool
    batch: Interval | None = None
    exchange_ms: Interval | None = None
    sample_ms: Interval | None = None


def exceeds_noise(loss: Interval, step_ms: float) -> bool:
    """Return whether a loss or a gain is different from 0 beyond the noise."""
    if loss.low is None or loss.high is None:
        return False
    side = loss.value - loss.low if loss.value > 0 else loss.high - loss.value
    return abs(loss.value) > max(INTERVAL_MARGIN * side, MIN_STEP_FRACTION * step_ms)


def lacked_time(reason: str) -> bool:
    """Return whether something was not measured because the time budget was too small."""
    return reason.endswith(LARGER_BUDGET_HINT)


MIN_REPAIR_FACTOR = 1.2
"""A repair of the largest cost that gains less does not change that devices cannot help."""
REMOVABLE_CAUSES = ("imbalance", "input", "single-process", "storage", "undivided-work")
"""Causes that can be removed completely: with such a cause, more devices may still help."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The result of one explanation. ``rows`` and ``one_device_rows`` have the largest cost first.

    ``ideal_ms`` is a step at N-fold speed over the same samples. ``not_significant_ms`` is the sum
    of the findings within the noise, ``not_attributed_ms`` the residual. ``unmeasured`` holds causes
    with the reason. ``parallelism`` is how a script uses its devices, ``headline`` are notes to read
    first; both are empty for a workload. ``multi_process_failure`` is the error of a script as one
    process per device, which does not happen as one process. ``device_bound`` is one device without its own losses.
    ``account`` divides the step on N devices, ``changes`` are the code to change in the order of
    their cost, ``exchange`` what is unusual about the gradient exchange,
    ``trials`` every variant with its steps. ``uses_one_device``: the script is one
    process on one device, whatever number was requested; ``several_devices`` is what more would do.
    ``fetch_lines`` are the lines of the data set that take most of the ``fetch_ms`` of a batch.
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
    multi_process_failure: str = ""
    lower_bound: LowerBound | None = None
    device_bound: Speed | None = None
    account: StepAccount | None = None
    changes: tuple[Change, ...] = ()
    trials: tuple[TrialSummary, ...] = ()
    not_applicable: tuple[str, ...] = ()
    uses_one_device: bool = False
    several_devices: SeveralDevices | None = None
    fetch_lines: tuple[FetchLine, ...] = ()
    fetch_ms: float = 0.0
    exchange: str = ""

    @property
    def devices(self) -> int:
        return self.plan.devices or 1

    @property
    def failure_sentence(self) -> str:
        """The failure of the script as one process per device, and what to do; empty without one."""
        if not self.multi_process_failure:
            return ""
        return (
            f"{self.target} fails as {self.devices} processes, as torchrun starts it: "
            f"{self.multi_process_failure}."
        )

    @property
    def significant(self) -> tuple[Finding, ...]:
        """The significant finding of each cause, that of N devices if there are two; largest first."""
        found = {row.cause: row for row in (*self.one_device_rows, *self.rows) if row.significant}
        return tuple(sorted(found.values(), key=lambda row: -row.total_ms.value))

    @property
    def devices_cannot_help(self) -> bool:
        """Return whether N devices are slower than one, and no change is known to make them faster."""
        limit = self.break_even_batch
        if limit is None or limit.devices_help or self.may_miss_causes or self.shared_cores:
            return False
        if any(one.measured and one.factor and _least(one.factor) > 1 for one in self.changes):
            return False
        costs = self.account.costs if self.account is not None else ()
        repairs = (one for one in self.changes[:1] if one.is_repair and one.row == costs[0].id)
        if any(one.factor and one.factor.value > MIN_REPAIR_FACTOR for one in repairs):
            return False
        fault = bool(self.significant) and self.significant[0].cause in REMOVABLE_CAUSES
        return not fault and not any(
            row.significant
            and row.fix_measured
            and row.predicted_speedup is not None
            and (row.predicted_speedup.low or 0.0) > 1
            for row in self.rows
        )

    @property
    def shared_cores(self) -> int:
        """The cores that all ranks are bound to if they are fewer than the ranks, else 0."""
        found = (one.value for one in self.caveats if one.kind == SHARED_CORES)
        return int(next(found, None) or 0)

    @property
    def may_miss_causes(self) -> bool:
        """Return whether a residual is left and the time was too short for some cause."""
        return bool(self.skipped_causes) and self.is_time_missing(self.not_attributed_ms)

    @property
    def skipped_causes(self) -> tuple[str, ...]:
        """The causes that the time was too short for."""
        return tuple(cause for cause, reason in self.unmeasured if lacked_time(reason))

    def is_time_missing(self, missing_ms: Interval) -> bool:
        """Return whether this time is above 0. A residual needs less certainty than a cause."""
        least = MIN_STEP_FRACTION * self.n_devices.step_ms.value
        return missing_ms.low is not None and missing_ms.low > 0 and missing_ms.value > least

    def to_json(self) -> dict[str, Any]:
        """Return the versioned object that ``nfold explain --json`` prints."""
        bound = self.lower_bound
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
            "interactions": serialize(self.interactions),
            "others_ms": serialize(self.not_significant_ms),
            "unexplained_ms": serialize(self.not_attributed_ms),
            "at_least": serialize(bound) | {"lost_ms": bound.lost_ms} if bound else None,
            "wrong": list(self.training_errors),
            "account": serialize(self.account),
            "changes": serialize(self.changes),
            "several_devices": serialize(self.several_devices),
            "warnings": serialize(self._all_caveats()),
        }

    def _all_caveats(self) -> list[Caveat]:
        notes = " ".join(filter(None, [self.failure_sentence, self.headline]))
        found = [Caveat(kind="headline", text=notes)] if notes else []
        found += self.caveats
        if self.devices_cannot_help:
            found.append(Caveat(kind="cannot_help", text=_explain_no_speedup(self)))
        unmeasured = self.unmeasured
        return found + [Caveat(kind=f"untested_{cause}", text=why) for cause, why in unmeasured]


def _least(factor: Interval) -> float:
    return factor.low or factor.value


def _explain_no_speedup(budget: Budget) -> str:
    """Return that N devices are slower than one, the batch that would change it, the next step."""
    assert budget.break_even_batch is not None
    limit, n, batch = budget.break_even_batch, budget.devices, budget.plan.batch
    found = "From which batch on they do was not measured; next: a larger --budget."
    if limit.evidence:
        found = f"By the measured steps no batch makes {n} devices faster."
    if limit.batch is not None:
        about = f"{limit.batch.value:,.0f} on{format_parenthesized_range(limit.batch, '{:,.0f}')}"
        found = f"They do from a batch of about {about}."
    return (
        f"{n} devices cannot help at batch {batch}: they are "
        f"{format_ratio_interval(budget.speedup)} as fast as one. {found} Train on one device, at "
        f"{budget.one_device.samples_per_s.value:,.0f} samples/s, or raise "
        f"{'its batch' if budget.parallelism else '--batch'}."
    )
