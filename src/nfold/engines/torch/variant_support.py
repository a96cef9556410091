"""How an ablation changes what a rank is told: its plan, its devices, its share. No torch here."""

from __future__ import annotations

import dataclasses
from typing import cast

from nfold import workloads
from nfold.core import interleave
from nfold.core.measurement import RankSamples
from nfold.core.plan import Plan
from nfold.core.variant import RefusalRule, Variant
from nfold.core.workload import Workload
from nfold.engines.base import Observer, Phase, Task


def workload_refusal(variant: Variant, workload: Workload, plan: Plan) -> str | None:
    """Why PyTorch cannot apply the ablation to the complete plan, or None."""
    cpu = plan.device == "cpu"
    rules = (
        (
            workloads.is_operation(workload) and variant != Variant(input=variant.input),
            f"{workload.name} has no gradients and no model: only its input can be left out",
        ),
        (
            workloads.is_operation(workload) and variant.input == "resident" and cpu,
            "a CPU device reads the host's memory: nothing is copied",
        ),
        (variant.captured and cpu, "a captured step is a CUDA graph: it needs a GPU"),
        (
            variant.captured and plan.strategy in ("ddp", "dp"),
            "a captured step exchanges gradients itself: strategy nfold or one device",
        ),
        (
            variant.captured and plan.precision == "fp16" and bool(workload.function_reference),
            "fp16 of a user's own workload is not captured",
        ),
        (not variant.pinned and not cpu, "only CPU devices are bound to cores"),
        (not variant.augmentation and not _has_augmentation(workload), "nothing is augmented"),
        *_script_only_rules(variant),
        (
            bool(variant)
            and plan.strategy == "dp"
            and bool(variant.devices or variant.data_shares),
            "nn.DataParallel has one rank",
        ),
    )
    return variant.refusal(plan) or next((reason for no, reason in rules if no), None)


def _script_only_rules(variant: Variant) -> tuple[RefusalRule, ...]:
    return (
        (
            not variant.broadcast_buffers,
            "batch-norm statistics are a device's own: none are broadcast",
        ),
        (variant.exchange == "half", "what a workload sends gradients as is its plan's"),
        (not variant.find_unused_parameters, "every parameter has a gradient: none is looked for"),
        (not variant.host_syncs, "the host reads nothing from the device in a step"),
        (not variant.anomaly_detection, "no backward of a workload is searched for NaN"),
        (variant.exchange_after_backward, "a workload exchanges its gradients itself"),
        (variant.profiler_steps, "only scripts are traced"),
        (variant.batches_per_epoch is not None, "epochs of a workload are measured whole"),
        (variant.channels_last, "the layout of a workload is its plan's"),
        (bool(variant.compiled), "how a workload makes its steps is its plan's"),
        (variant.expandable_segments, "the allocator of a workload is PyTorch's as it is"),
    )


def script_refusal(variant: Variant, workload: Workload, plan: Plan) -> str | None:
    """Why the ablation cannot be applied to a script, or None. The rest is seen in the rank."""
    cpu = plan.device == "cpu"
    rules = (
        (variant.captured, f"the step of {workload.name} is the script's own: it is not captured"),
        (not variant.augmentation, "what a script does to its samples cannot be told apart"),
        (not variant.pinned and not cpu, "only CPU devices are bound to cores"),
        (
            plan.strategy == "dp" and bool(variant.devices or variant.data_shares),
            "nn.DataParallel has one rank",
        ),
    )
    return variant.refusal(plan) or next((reason for no, reason in rules if no), None)


def switchable_fields(workload: Workload, plan: Plan) -> tuple[str, ...]:
    """The fields of an Ablation that can change between two steps of this plan.

    Other threads would have a compiled step compiled again; several steps of one graph cannot
    differ, and whole epochs are timed as they are.
    """
    if plan.epochs is not None:
        return ()
    if workload.script:
        return interleave.SWITCHABLE_FIELDS
    if workloads.is_operation(workload) or plan.steps_per_execution > 1:
        return ()
    found = ("input", "exchange", "synchronised_batch_norm")
    return found if "compiled" in str(plan.step) else (*found, "threads")


def _has_augmentation(workload: Workload) -> bool:
    if workload.function_reference is not None:
        return True
    return bool(workloads.info(workload.name).augmentation_for(workloads.parameters(workload)))


def apply_variant(task: Task) -> Task:
    """The task as a rank carries it out. Without an ablation it is the same.

    An independent rank is alone in its world, with a batch of the size of its share.
    """
    left_out, rank = task.variant, task.rank
    if not left_out:
        return task
    local = left_out.device_of(rank, task.local_rank)
    own = dataclasses.replace(
        task,
        plan=_edit_plan(task.plan, left_out),
        rank=left_out.data_shares[rank] if left_out.data_shares else rank,
        local_rank=local,
    )
    return _as_independent_rank(own) if left_out.independent else own


def _edit_plan(plan: Plan, variant: Variant) -> Plan:
    step = "captured" if variant.captured else plan.step
    batch_norm = plan.batch_norm if variant.synchronised_batch_norm else "device"
    return plan.edit(step=step, batch_norm=batch_norm)


def _as_independent_rank(task: Task) -> Task:
    share = -(-cast(int, task.plan.batch) // task.world_size)
    plan = task.plan.edit(devices=1, strategy="single", batch=share)
    return dataclasses.replace(task, plan=plan, rank=0, world_size=1)


class RankObserver(Observer):
    """An observer of a rank that carries out another one's task."""

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
