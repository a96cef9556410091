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
from nfold.workloads import info, is_operation, parameters

ONE_RANK = "nn.DataParallel has one rank"


def workload_refusal(variant: Variant, workload: Workload, plan: Plan) -> str | None:
    cpu, dp, operation = plan.device == "cpu", plan.strategy == "dp", is_operation(workload)
    return variant.refusal(plan) or first_broken_rule(
        {
            f"{workload.name} has no gradients and no model: only its input can change": (
                operation and variant != Variant(input=variant.input)
            ),
            "a CPU device reads the host's memory: nothing is copied": (
                operation and variant.input == "resident" and cpu
            ),
            "a captured step is a CUDA graph: it needs a GPU": variant.captured and cpu,
            "a captured step exchanges gradients itself: strategy nfold or one device": (
                variant.captured and plan.strategy in ("ddp", "dp")
            ),
            "fp16 of a user's own workload is not captured": (
                variant.captured and plan.precision == "fp16" and bool(workload.function_reference)
            ),
            "only CPU devices are bound to cores": not variant.pinned and not cpu,
            "nothing is augmented": (
                not variant.augmentation
                and workload.function_reference is None
                and not info(workload.name).augmentation_for(parameters(workload))
            ),
            "batch-norm statistics belong to each device: none are broadcast": (
                not variant.broadcast_buffers
            ),
            "the plan sets the type of exchanged gradients": variant.exchange == "half",
            "every parameter has a gradient: there is no search": (
                not variant.find_unused_parameters
            ),
            "the host reads nothing from the device in a step": not variant.host_syncs,
            "anomaly detection is off in workloads": not variant.anomaly_detection,
            "a workload exchanges its gradients itself": variant.exchange_after_backward,
            "only scripts are profiled": bool(variant.profiler_steps),
            "epochs of a workload are measured whole": variant.batches_per_epoch is not None,
            "the plan sets the layout": variant.channels_last,
            "the plan sets how steps are compiled": bool(variant.compiled),
            "workloads use PyTorch's default allocator": variant.expandable_segments,
            ONE_RANK: dp and bool(variant.devices or variant.data_shares),
        }
    )


def script_refusal(variant: Variant, workload: Workload, plan: Plan) -> str | None:
    """Return why the variant cannot be applied to a script, or None. The rank checks the script."""
    cpu, dp = plan.device == "cpu", plan.strategy == "dp"
    return variant.refusal(plan) or first_broken_rule(
        {
            f"the step of {workload.name} belongs to the script: it is not captured": (
                variant.captured
            ),
            "the augmentation of a script cannot be separated": not variant.augmentation,
            "only CPU devices are bound to cores": not variant.pinned and not cpu,
            ONE_RANK: dp and bool(variant.devices or variant.data_shares),
        }
    )


def switchable_fields(workload: Workload, plan: Plan) -> tuple[str, ...]:
    """Return the fields of a Variant that can change between two steps of this plan.

    Another number of threads would recompile a compiled step. Several steps of one graph cannot
    differ, and whole epochs are timed without changes.
    """
    if plan.epochs is not None:
        return ()
    if workload.script:
        return interleave.SWITCHABLE_FIELDS
    if is_operation(workload) or plan.steps_per_execution > 1:
        return ()
    fields = ("input", "exchange", "synchronised_batch_norm")
    return fields if "compiled" in str(plan.step) else (*fields, "threads")


def apply_variant(task: Task) -> Task:
    """Return the task that a rank carries out; without interventions, ``task``.

    An independent rank has a world of its own, with a batch of the size of its share.
    """
    variant, plan, rank = task.variant, task.plan, task.rank
    if not variant:
        return task
    plan = plan.edit(
        step="captured" if variant.captured else plan.step,
        batch_norm=plan.batch_norm if variant.synchronised_batch_norm else "device",
    )
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
