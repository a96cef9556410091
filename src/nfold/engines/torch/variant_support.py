"""How a variant changes the task of a rank, and which variants PyTorch refuses. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import cast

from nfold.core import interleave
from nfold.core.measurement import RankSamples
from nfold.core.plan import Plan
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.base import Observer, Phase, Task
from nfold.engines.plan_rules import first_broken_rule
from nfold.engines.torch.torch_rules import run_device_rules, script_rules
from nfold.interventions.intervention import WorkloadFacts
from nfold.interventions.registry import REGISTRY
from nfold.workloads import info, is_operation, parameters


def refusal(variant: Variant, workload: Workload, plan: Plan) -> str | None:
    """Return why PyTorch cannot apply the variant, or None. The rank of a script checks more."""
    if reason := variant.refusal(plan):
        return reason
    facts = _workload_facts(workload)
    if facts.is_operation and not all(
        each.applies_to_operations for each, _ in variant.interventions()
    ):
        return f"{workload.name} has no gradients and no model: only its input can change"
    reasons = (each.torch_refusal(value, plan, facts) for each, value in variant.interventions())
    reason = next((reason for reason in reasons if reason), None)
    return reason or _run_plan_refusal(variant, plan)


def _run_plan_refusal(variant: Variant, plan: Plan) -> str | None:
    """Return why a script with nfold.Run cannot have the fields, or None."""
    if not variant.run_plan:
        return None
    fields = Plan(device=plan.device, accumulate=plan.accumulate).edit(**dict(variant.run_plan))
    rules = {**script_rules(fields, plan.devices or 1), **run_device_rules(fields)}
    return first_broken_rule(rules)


def _workload_facts(workload: Workload) -> WorkloadFacts:
    if workload.script:
        return WorkloadFacts(name=workload.name, is_script=True)
    if workload.function_reference is not None:
        return WorkloadFacts(name=workload.name, is_function=True)
    return WorkloadFacts(
        name=workload.name,
        is_operation=is_operation(workload),
        augments=bool(info(workload.name).augmentation_for(parameters(workload))),
    )


def switchable_fields(workload: Workload, plan: Plan) -> tuple[str, ...]:
    """Return the fields of a Variant that can change between two steps of this plan.

    Several steps of one graph cannot differ, and whole epochs are timed without changes.
    """
    if plan.epochs is not None:
        return ()
    if workload.script:
        return interleave.SWITCHABLE_FIELDS
    if is_operation(workload) or plan.steps_per_execution > 1:
        return ()
    return tuple(name for name, each in REGISTRY.items() if each.switchable_in_workload(plan))


def apply_variant(task: Task) -> Task:
    """Return the task that a rank carries out; without interventions, ``task``.

    An independent rank has a world of its own, with a batch of the size of its share.
    """
    variant, plan, rank = task.variant, task.plan, task.rank
    if not variant:
        return task
    for intervention, value in variant.interventions():
        plan = intervention.edit_plan(value, plan)
    own = dataclasses.replace(
        task,
        plan=plan,
        rank=variant.data_shares[rank] if variant.data_shares else rank,
        local_rank=variant.device_of(rank, task.local_rank),
    )
    if not variant.independent:
        return own
    share = -(-cast(int, plan.batch) // task.world_size)
    one_device = plan.edit(devices=1, strategy="single", batch=share)
    return dataclasses.replace(own, plan=one_device, rank=0, world_size=1)


class RankObserver(Observer):
    """The observer of a rank that carries out another rank's task."""

    def __init__(self, observer: Observer, rank: int) -> None:
        self._observer = observer
        self._rank = rank

    def beat(self, phase: Phase, step: int, total: int = 0) -> None:
        self._observer.beat(phase, step, total)

    def save(self, samples: RankSamples, *, epoch_ended: bool = False) -> None:
        own = dataclasses.replace(samples, rank=self._rank)
        self._observer.save(own, epoch_ended=epoch_ended)

    def wait_for_other_ranks(self, step: int) -> None:
        self._observer.wait_for_other_ranks(step)

    def wait_for_idle_children(self) -> None:
        self._observer.wait_for_idle_children()
