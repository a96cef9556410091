"""Which remedies are tried on a script or workload, in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nfold.core.plan import Plan
from nfold.core.stats import Interval
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.result.budget import Budget
from nfold.interventions.intervention import NUMERICS, Numerics
from nfold.interventions.registry import REGISTRY
from nfold.tune.settings_file import keepable_remedies

CONVERSION = "conversion"
"""Name of the remedy that makes a script data-parallel with nfold.Run; its value: the devices."""
PLAN_NUMERICS: dict[str, Numerics] = {
    CONVERSION: "rounding",
    "workers": "same",
    "input": "same",
    "step": "rounding",
    "layout": "rounding",
    "kernels": "rounding",
    "precision": "training",
    "exchange": "training",
    "strategy": "same",
}
PLAN_PERMISSIONS = {"precision": "precision", "exchange": "communication"}
PERMISSIONS = tuple(
    sorted({each.permission for each in REGISTRY.values()} - {""} | {*PLAN_PERMISSIONS.values()})
)
"""The values of ``--allow``: each lets remedies change the training."""
MIN_WORKER_LIMIT = 8  # workers that wait for storage need no core
MIN_COST_FRACTION = 0.01  # of a step: remedies of smaller costs are tried as the standard ones are
# Causes and the remedies that remove them, the likeliest first; other remedies are tried after these.
REMEDIES_OF_CAUSES: dict[str, tuple[str, ...]] = {
    "input": (
        "workers",
        "input",
        "loader_prefetch_factor",
        "loader_persistent_workers",
        "threads",
    ),
    "storage": ("workers", "loader_prefetch_factor"),
    "epoch-boundary": ("loader_persistent_workers",),
    "first-epoch": ("workers",),
    "link": (
        "ddp_bucket_mb",
        "gradient_as_bucket_view",
        "nccl_algorithm",
        "nccl_protocol",
    ),
    "synchronization": (
        "find_unused_parameters",
        "broadcast_buffers",
        "ddp_static_graph",
        "gradient_as_bucket_view",
    ),
    "launch-bound": ("compiled", "step", "fused_optimizer"),
    "layout": ("channels_last", "layout"),
    "threads": ("threads",),
    "memory": ("expandable_segments",),
    "copies": ("loader_pin_memory", "non_blocking_copies"),
    "imbalance": ("threads", "garbage_collection_frozen"),
    "single-process": ("strategy",),
}
STANDARD = (
    "anomaly_detection",  # these three are tried only where the script has what they change
    "find_unused_parameters",
    "set_grads_to_none",
    "workers",
    "compiled",
    "step",
    "channels_last",
    "layout",
    "cudnn_benchmark",
    "fused_optimizer",
    "ddp_static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
    "loader_pin_memory",
    "loader_persistent_workers",
    "non_blocking_copies",
    "garbage_collection_frozen",
)


# They help on some machines and harm on others: never tried together with others.
MACHINE_DEPENDENT = (
    "threads",
    "ddp_bucket_mb",
    "nccl_p2p",
    "nccl_shared_memory_off",
    "nccl_algorithm",
    "nccl_protocol",
)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change that a user can keep: a field of the plan or an intervention, and its value.

    ``reason`` says what it is tried for: ``input: 48 of 72 ms of a step``, or ``standard``.
    ``predicted`` is the factor of the throughput that an explanation expects.
    """

    name: str
    value: Any
    reason: str = ""
    predicted: Interval | None = None

    @property
    def is_plan_field(self) -> bool:
        return self.name not in REGISTRY

    @property
    def numerics(self) -> Numerics:
        if self.is_plan_field:
            return PLAN_NUMERICS[self.name]
        numerics = REGISTRY[self.name].numerics
        assert numerics is not None
        return numerics

    @property
    def permission(self) -> str:
        if self.is_plan_field:
            return PLAN_PERMISSIONS.get(self.name, "")
        return REGISTRY[self.name].permission

    @property
    def label(self) -> str:
        """``channels_last``, ``num_workers=4``."""
        if self.name == "workers":
            return f"num_workers={self.value}"
        if self.name == CONVERSION:
            return f"nfold.Run on {self.value} devices"
        if self.is_plan_field:
            return f"{self.name} {self.value}"
        return REGISTRY[self.name].label(self.value)

    def apply(self, trial: Trial) -> Trial:
        """Return the trial with the remedy, in place of another value of the same."""
        if self.name == CONVERSION:
            return trial.edit(strategy="ddp")
        change = {self.name: self.value}
        return trial.edit(**change) if self.is_plan_field else trial.under(**change)

    def further(self, cores: int, plan: Plan) -> Remedy | None:
        """Return the next value in the same direction, to try if this one is kept, or None."""
        if self.name != "workers" or not self.value or self.value <= (plan.workers or 0):
            return None
        limit = max(MIN_WORKER_LIMIT, cores // (plan.devices or 1))
        if 2 * self.value > limit:
            return None
        return dataclasses.replace(self, value=2 * self.value)


def apply_all(remedies: Iterable[Remedy], trial: Trial) -> Trial:
    for remedy in remedies:
        trial = remedy.apply(trial)
    return trial


def conversion_to(design: ExperimentDesign) -> Remedy:
    """Return the conversion of a script to all devices of a design."""
    share = f"{design.batch_per_device} of its {design.plan.batch} samples on each device"
    reason = f"the batch of a step is unchanged, {share}"
    return Remedy(name=CONVERSION, value=design.devices, reason=reason)


def first_values(remedies: Iterable[Remedy]) -> list[Remedy]:
    """Return the first value of each remedy that rarely makes a training slower."""
    found: dict[str, Remedy] = {}
    for remedy in remedies:
        if remedy.name not in MACHINE_DEPENDENT:
            found.setdefault(remedy.name, remedy)
    return [*found.values()]


def largest_change(remedies: Iterable[Remedy]) -> Numerics:
    """Return how remedies together may change the numbers of a training."""
    return max((one.numerics for one in remedies), key=NUMERICS.index, default="same")


def choose_remedies(
    design: ExperimentDesign, budget: Budget, cores: int, allowed: Collection[str]
) -> list[Remedy]:
    """Return the remedies to try: those of costly causes first, then the standard list.

    Those that change the training need their permission in ``allowed``.
    """
    reasons = dict(_reasons(budget))
    names = [*reasons, *(name for name in STANDARD if name not in reasons)]
    names += [
        name
        for name, each in REGISTRY.items()
        if each.kind == "remedy" and each.permission in allowed and each.permission
    ]
    found = []
    for name in dict.fromkeys(names):
        reason, predicted = reasons.get(name, ("standard", None))
        for value in values_to_try(name, design, cores):
            remedy = Remedy(name=name, value=value, reason=reason, predicted=predicted)
            if not remedy.permission or remedy.permission in allowed:
                found.append(remedy)
    if design.profile is not None:
        keepable = keepable_remedies()
        found = [remedy for remedy in found if remedy.name in keepable]
    actual = design.actual()
    return [remedy for remedy in found if remedy.apply(actual) != actual]


def _reasons(budget: Budget) -> Iterator[tuple[str, tuple[str, Interval | None]]]:
    """Yield remedies with what they are tried for, those of the largest cost first.

    Costs that are within the noise count too: a try shows more than they do.
    """
    if budget.account is None:
        return
    account, seen = budget.account, set()
    step_ms = account.step_ms.value
    factors = {change.row: change.factor for change in budget.changes}
    rows = [row for row in (*account.costs, *account.small, *account.one_device) if row.causes]
    for row in sorted(rows, key=lambda one: -one.ms.value):
        if row.ms.value < MIN_COST_FRACTION * step_ms:
            continue
        for name in dict.fromkeys(n for c in row.causes for n in REMEDIES_OF_CAUSES.get(c, ())):
            if name not in seen:
                seen.add(name)
                cost = f"{row.label}: {row.ms.value:.3g} of {step_ms:.3g} ms of a step"
                yield name, (cost, factors.get(row.id))


def values_to_try(name: str, design: ExperimentDesign, cores: int) -> tuple[Any, ...]:
    """Return the values of a remedy for this script or workload; empty if it cannot help it."""
    if name in REGISTRY:
        intervention, profile = REGISTRY[name], design.profile
        if profile is None or not intervention.is_useful(profile):
            return ()
        return intervention.values_to_try(profile, design.plan, cores)
    if name not in PLAN_NUMERICS:
        return ()
    return _plan_values(name, design, design.plan, cores)


def _plan_values(name: str, design: ExperimentDesign, plan: Plan, cores: int) -> tuple[Any, ...]:
    if name == "workers":
        return _worker_counts(design, plan, cores)
    if design.profile is not None:
        return ()  # the script sets it
    on_gpu = plan.device == "cuda"
    values: dict[str, tuple[Any, ...]] = {
        "step": ("captured", "compiled+captured") if on_gpu else ("compiled",),
        "layout": ("channels_last", "channels_first"),
        "input": ("resident",),
        "kernels": ("tuned",) if "compiled" in str(plan.step) and on_gpu else (),
        "precision": ("bf16",) if on_gpu else (),
        "exchange": ("bf16",) if (plan.devices or 1) > 1 else (),
        "strategy": ("nfold",) if plan.strategy in ("dp", "ddp") else (),
    }
    return values[name]


def _worker_counts(design: ExperimentDesign, plan: Plan, cores: int) -> tuple[int, ...]:
    if design.profile is not None and design.profile.loader is None:
        return ()
    own, share = plan.workers or 0, max(1, cores // (plan.devices or 1))
    if plan.device == "cpu":  # workers have no cores of their own
        counts = [2 * own or 2, own // 2 or 1, 0]
    else:
        counts = [min(share, max(4, 2 * own)), share, own // 2, 2 * own]
    limit = max(MIN_WORKER_LIMIT, share)
    allowed = [count for count in counts if count <= limit and count != own]
    return tuple(dict.fromkeys(allowed))[:3]
