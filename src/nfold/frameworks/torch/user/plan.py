"""The plan of a user's script: what of it applies there, and its automatic choices."""

from __future__ import annotations

from collections.abc import Callable

from nfold.errors import UsageError
from nfold.frameworks.torch.user.job import Job
from nfold.plan import Plan

RunRule = tuple[Callable[[Plan, Job], bool], str]

RUN_PLAN_RULES: tuple[RunRule, ...] = (
    (lambda plan, _: plan.framework != "torch", "a script of PyTorch's needs framework 'torch'"),
    (
        lambda plan, job: plan.devices not in (None, job.world_size),
        "devices differ from the ranks of this job; next: nfold run --devices N SCRIPT",
    ),
    (
        lambda plan, _: plan.strategy == "dp",
        "strategy 'dp' drives all devices from one process; next: leave strategy out",
    ),
    (
        lambda plan, _: plan.strategy in ("mirrored", "data_parallel"),
        "strategy 'mirrored' is TensorFlow's, 'data_parallel' JAX's; next: leave strategy out",
    ),
    (
        lambda plan, _: plan.step == "graph",
        "step 'graph' is TensorFlow's; allowed are eager, compiled, captured, compiled+captured",
    ),
    (
        lambda plan, _: plan.input in ("generator", "tf.data"),
        "input 'generator' and 'tf.data' are Keras's; allowed are loader and resident",
    ),
    (
        lambda plan, _: plan.decode is not None or plan.cache != "off",
        "decode and cache are of nfold's own image files: a script's data set reads its own; next: "
        "leave them out",
    ),
    (
        lambda plan, _: plan.kernels != "default" or plan.steps_per_execution > 1,
        "kernels and steps_per_execution act in nfold train and bench, whose step is nfold's own; "
        "next: leave them out",
    ),
    (
        lambda plan, _: plan.allocation != "default",
        "allocation is TensorFlow's and JAX's: torch takes memory as it needs it; next: leave it "
        "out",
    ),
    (
        lambda plan, _: plan.augment == "cpu",
        "run.loader(augment=...) works on the device; on the CPU, the data set itself augments",
    ),
    (
        lambda plan, job: plan.precision in ("tf32", "fp16") and job.device.type == "cpu",
        "precisions tf32 and fp16 need a GPU; next: fp32 or bf16",
    ),
)
"""What a script's plan cannot be, each with the reason that a user reads."""


def complete_run_plan(plan: Plan, job: Job) -> Plan:
    """``asked`` with every choice made that acts in a script; UsageError for what cannot be.

    Choices that change numbers (bf16, compression) are made only when asked for.
    """
    for breaks, reason in RUN_PLAN_RULES:
        if breaks(plan, job):
            raise UsageError(reason)
    precision = plan.precision or "fp32"
    tensor_cores = job.device.type == "cuda" and precision != "fp32"
    return plan.edit(
        device=job.device.type,
        devices=job.world_size,
        precision=precision,
        layout=plan.layout or ("channels_last" if tensor_cores else "channels_first"),
        step=plan.step or "eager",
        workers=plan.workers or 0,
    )
