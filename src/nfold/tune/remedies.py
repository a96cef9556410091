"""Which remedies are tried on a script or workload, in which order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nfold.core.format import join_words
from nfold.core.plan import Plan
from nfold.core.stats import Interval
from nfold.core.variant import LOADER_FIELDS
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.result.budget import Budget
from nfold.interventions.intervention import NUMERICS, Numerics
from nfold.interventions.registry import REGISTRY
from nfold.tune.plan_fields import (
    EXCLUDED_WITH_RUN,
    TUNABLE_FIELDS,
    field_values,
    worker_counts,
    worker_limit,
)
from nfold.tune.settings_file import keepable_remedies

Refusal = Callable[[Trial], str | None]
"""Why a trial cannot run, or None."""

CONVERSION = "conversion"
"""Name of the remedy that makes a script data-parallel with nfold.Run; its value: the devices."""
CONVERTED_STRATEGY = "ddp"
PERMISSIONS = tuple(
    sorted(
        {each.permission for each in REGISTRY.values() if each.permission}
        | {each.permission for each in TUNABLE_FIELDS.values() if each.permission}
    )
)
"""The values of ``--allow``: each lets remedies change the training."""
MAX_NEEDED_FIELDS = 2
MAX_BATCH_FACTOR = 8  # of the batch of the original
MIN_COST_FRACTION = 0.01  # of a step: remedies of smaller costs are tried as the standard ones are
# Causes and the remedies that remove them, the likeliest first; other remedies are tried after these.
REMEDIES_OF_CAUSES: dict[str, tuple[str, ...]] = {
    "input": (
        "restored_affinity",
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
        "exchange_each_micro_batch",
        "exchange",  # these three need a permission: who gives it has the largest gain first
        "gradient_compression",
        "batch",
        "ddp_bucket_mb",
        "gradient_as_bucket_view",
        "nccl_algorithm",
        "nccl_protocol",
    ),
    "synchronization": (
        "exchange_each_micro_batch",
        "host_syncs",
        "find_unused_parameters",
        "broadcast_buffers",
        "ddp_static_graph",
        "gradient_as_bucket_view",
    ),
    "launch-bound": ("compiled", "step", "fused_optimizer", "batch"),
    "layout": ("channels_last", "layout"),
    "threads": ("restored_affinity", "threads"),
    "memory": ("expandable_segments",),
    "copies": ("loader_pin_memory", "non_blocking_copies"),
    "imbalance": ("threads", "garbage_collection_frozen"),
    "single-process": ("strategy",),
}
STANDARD = (
    "anomaly_detection",  # these seven are tried only where the script has what they change
    "exchange_each_micro_batch",
    "host_syncs",
    "activation_checkpointing",
    "restored_affinity",
    "find_unused_parameters",
    "set_grads_to_none",
    "workers",
    "compiled",
    "channels_last",
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

# What remedies work on; all others work on the computation.
INPUT_REMEDIES = (
    *REMEDIES_OF_CAUSES["input"],
    *REMEDIES_OF_CAUSES["epoch-boundary"],
    *REMEDIES_OF_CAUSES["copies"],
    "loader_in_order",
    "cache",
    "decode",
    "augment",
)
COMMUNICATION_REMEDIES = (*REMEDIES_OF_CAUSES["link"], *REMEDIES_OF_CAUSES["synchronization"])
PROMISING = 1.1  # what may gain so much is first tried alone, and gets more runs
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

    ``needs`` are values of other fields without which a plan with this one is refused. ``in_run``: the
    field is one of a script's ``nfold.Run``. ``reason`` says what it is tried for: ``input: 48 of 72
    ms of a step``, or ``standard``. ``predicted`` is the factor of the throughput that an explanation
    expects.
    """

    name: str
    value: Any
    needs: tuple[tuple[str, Any], ...] = ()
    in_run: bool = False
    reason: str = ""
    predicted: Interval | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the plan that it sets."""
        return {**dict(self.needs), self.name: self.value}

    @property
    def is_plan_field(self) -> bool:
        """Return whether it changes the plan by which nfold runs a workload or a script."""
        return self.name in TUNABLE_FIELDS and not self.in_run

    @property
    def _is_field(self) -> bool:
        return self.name in TUNABLE_FIELDS

    @property
    def numerics(self) -> Numerics:
        if self.name == CONVERSION:
            return "rounding"
        if self._is_field:
            return max((TUNABLE_FIELDS[one].numerics for one in self.fields), key=NUMERICS.index)
        numerics = REGISTRY[self.name].numerics
        assert numerics is not None
        return numerics

    @property
    def has_other_draws(self) -> bool:
        """Return whether a data set that augments samples draws other random numbers for them."""
        return self._is_field and TUNABLE_FIELDS[self.name].draws

    @property
    def is_in_source_only(self) -> bool:
        """Return whether only an edit of the script keeps it, not ``nfold run --with``."""
        known = self.name in REGISTRY and not self._is_field
        return known and bool(REGISTRY[self.name].refused_in_runs)

    @property
    def sets_loader(self) -> bool:
        """Return whether it sets an argument of the DataLoader that feeds the training."""
        if self.name == CONVERSION or self._is_field:
            return self.name in LOADER_FIELDS
        return bool(REGISTRY[self.name].loader_arguments(self.value))

    @property
    def is_promising(self) -> bool:
        return self.predicted is not None and self.predicted.value >= PROMISING

    @property
    def works_on(self) -> str:
        """``input``, ``communication`` or ``computation``."""
        if self.name in INPUT_REMEDIES:
            return "input"
        return "communication" if self.name in COMMUNICATION_REMEDIES else "computation"

    @property
    def permission(self) -> str:
        if self.name == CONVERSION:
            return ""
        if self._is_field:
            return TUNABLE_FIELDS[self.name].permission
        return REGISTRY[self.name].permission

    @property
    def label(self) -> str:
        """``channels_last``, ``num_workers=4``, ``step compiled with strategy nfold``."""
        if self.name == CONVERSION:
            return f"nfold.Run on {self.value} devices"
        if self._is_field and TUNABLE_FIELDS[self.name].label:
            return TUNABLE_FIELDS[self.name].label.format(self.value)
        if self._is_field:
            needed = join_words([f"{name} {value}" for name, value in self.needs])
            return f"{self.name} {self.value}{needed and f' with {needed}'}"
        return REGISTRY[self.name].label(self.value)

    def apply(self, trial: Trial) -> Trial:
        """Return the trial with the remedy, in place of another value of the same."""
        if self.name == CONVERSION:
            return trial.edit(strategy=CONVERTED_STRATEGY)
        if self.is_plan_field:
            return trial.edit(**self.fields)
        if self.in_run:
            return trial.under(
                run_plan=tuple({**dict(trial.variant.run_plan), **self.fields}.items())
            )
        return trial.under(**{self.name: self.value})

    def further(self, cores: int, plan: Plan) -> Remedy | None:
        """Return the next value in the same direction, to try if this one is kept, or None."""
        if self.name == "batch":
            limit = MAX_BATCH_FACTOR * (plan.batch or 0)
        elif self.name == "workers" and self.value and self.value > (plan.workers or 0):
            limit = worker_limit(plan, cores)
        else:
            return None
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


def groups_to_try(remedies: Iterable[Remedy]) -> list[list[Remedy]]:
    """Return the first value of each remedy that rarely makes a training slower, by what it works on.

    Groups from which an explanation expects much come first, then the computation, which it does not
    explain. What needs a permission, such as bf16, is in no group: it can be far slower where the
    hardware lacks it.
    """
    found: dict[str, dict[str, Remedy]] = {}
    for remedy in remedies:
        alone = remedy.name in MACHINE_DEPENDENT or remedy.permission or remedy.is_in_source_only
        if not alone:
            found.setdefault(remedy.works_on, {}).setdefault(remedy.name, remedy)

    def order(part: str) -> int:
        expected = any(one.is_promising for one in found[part].values())
        return 0 if expected else 1 if part == "computation" else 2

    return [[*found[part].values()] for part in sorted(found, key=order)]


def largest_change(remedies: Iterable[Remedy]) -> Numerics:
    """Return how remedies together may change the numbers of a training."""
    return max((one.numerics for one in remedies), key=NUMERICS.index, default="same")


def choose_remedies(
    design: ExperimentDesign,
    budget: Budget,
    cores: int,
    allowed: Collection[str],
    refusal: Refusal,
) -> list[Remedy]:
    """Return the remedies to try: those of costly causes first, then the standard list.

    Those that change the training need their permission in ``allowed``. Values of a field that the
    rules of the framework refuse in any case are not returned.
    """
    reasons = dict(_reasons(budget))
    permitted = [
        name
        for name, each in REGISTRY.items()
        if each.kind == "remedy" and each.permission in allowed and each.permission
    ]
    found = []
    for name in dict.fromkeys([*reasons, *STANDARD, *TUNABLE_FIELDS, *permitted]):
        reason, predicted = reasons.get(name, ("standard", None))
        for value in values_to_try(name, design, cores):
            remedy = Remedy(
                name=name,
                value=value,
                in_run=design.profile is not None
                and name in TUNABLE_FIELDS
                and name not in LOADER_FIELDS,
                reason=reason,
                predicted=predicted,
            )
            if not remedy.permission or remedy.permission in allowed:
                found.append(remedy)
    actual = design.actual()
    if design.profile is not None:
        keepable = keepable_remedies()
        found = [
            one
            for one in found
            if one.name in keepable or one.is_in_source_only or _is_possible(one, actual, refusal)
        ]
    else:
        needed = PlanCompletion(cores, allowed, refusal)
        found = [remedy for remedy in found if needed.complete(remedy, actual) is not None]
    return [remedy for remedy in found if remedy.apply(actual) != actual]


def _is_possible(remedy: Remedy, actual: Trial, refusal: Refusal) -> bool:
    return remedy.in_run and refusal(remedy.apply(actual)) is None


@dataclass(frozen=True)
class PlanCompletion:
    """Finds the other fields that a plan needs with a remedy, such as another strategy with a step."""

    cores: int
    allowed: Collection[str]
    refusal: Refusal

    def complete(
        self, remedy: Remedy, trial: Trial, kept: Collection[Remedy] = ()
    ) -> Remedy | None:
        """Return the remedy with the fewest needed fields, or None if every such plan is refused.

        Fields that other kept remedies set stay. A remedy in place of a kept value has its needs.
        """
        replaced = [one for one in kept if one.name == remedy.name]
        inherited = dict(need for one in replaced for need in one.needs)
        fixed = {name for one in kept for name in one.fields} | {remedy.name}
        others = [
            (name, value)
            for name, each in TUNABLE_FIELDS.items()
            if name not in fixed and (not each.permission or each.permission in self.allowed)
            for value in field_values(name, trial.plan, self.cores)
        ]
        for count in range(MAX_NEEDED_FIELDS + 1):
            for needs in itertools.combinations(others, count):
                if len(dict(needs)) == count:
                    needed = tuple((inherited | dict(needs)).items())
                    complete = dataclasses.replace(remedy, needs=needed)
                    if self.refusal(complete.apply(trial)) is None:
                        return complete
        return None


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
    if name in TUNABLE_FIELDS and design.profile is None:
        return field_values(name, design.plan, cores)
    has_run = "run" in design.facts.source_locations
    if has_run and name in EXCLUDED_WITH_RUN:
        return ()
    if name == "workers":
        return worker_counts(design.plan, cores) if design.facts.loader is not None else ()
    if name == "batch":
        usable = design.facts.accepts_batch_size and not design.facts.companion_loaders
        return field_values(name, design.plan, cores) if usable else ()
    if name in TUNABLE_FIELDS:
        has_field = TUNABLE_FIELDS[name].in_run and has_run
        return field_values(name, design.plan, cores) if has_field else ()
    intervention, profile = REGISTRY[name], design.profile
    if profile is None or not intervention.is_useful(profile):
        return ()
    return intervention.values_to_try(profile, design.plan, cores)
