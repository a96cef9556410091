"""PyTorch behind the seam. Imports no torch: what it cannot do is known without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import ClassVar

from nfold.ablation import Ablation
from nfold.frameworks.base import Framework, Observer, Task
from nfold.frameworks.torch.ablation import refusal, seen
from nfold.frameworks.torch.cores import claimed_cores
from nfold.machine import Machine
from nfold.measurement import RankSamples
from nfold.plan import Plan
from nfold.workload import Workload
from nfold.workloads import info

Rule = tuple[Callable[[Plan], bool], str]

RULES: tuple[Rule, ...] = (
    (
        lambda plan: "captured" in str(plan.step) and plan.device == "cpu",
        "a captured step is a CUDA graph: it needs a GPU; next: --step compiled or eager",
    ),
    (
        lambda plan: plan.step != "eager" and plan.strategy in ("ddp", "dp"),
        "a compiled or captured step exchanges gradients itself; next: --strategy nfold",
    ),
    (
        lambda plan: "compiled" in str(plan.step) and plan.batch_norm == "synchronised",
        "synchronised batch norm cannot be compiled; next: --step captured or eager",
    ),
    (
        lambda plan: plan.kernels == "tuned" and "compiled" not in str(plan.step),
        "only a compiled step has kernels to tune; next: --step compiled",
    ),
    (
        lambda plan: plan.input == "resident" and plan.augment == "cpu",
        "input 'resident' has no loader whose workers could augment on the CPU; next: "
        "--augment device",
    ),
    (
        lambda plan: plan.strategy == "dp" and plan.exchange != "fp32",
        "nn.DataParallel adds gradients up on one device: there is no exchange to compress",
    ),
    (
        lambda plan: plan.strategy == "dp" and plan.batch_norm == "synchronised",
        "nn.DataParallel runs its devices as threads of one process, which cannot wait for each "
        "other inside a layer; next: --strategy ddp or nfold",
    ),
    (
        lambda plan: plan.strategy == "dp" and plan.device == "cpu",
        "nn.DataParallel drives several GPUs from one process; CPU devices are processes: use ddp",
    ),
    (
        lambda plan: plan.strategy == "ddp" and plan.exchange == "bf16" and plan.device == "cpu",
        "DistributedDataParallel compresses on GPUs only; --strategy nfold does on CPU devices too",
    ),
    (
        lambda plan: plan.precision == "tf32" and plan.device == "cpu",
        "tf32 is a mode of NVIDIA's tensor cores; a CPU device has none",
    ),
    (
        lambda plan: plan.precision == "fp16" and plan.device == "cpu",
        "fp16 training needs a GPU; bf16 also runs on CPU devices",
    ),
    (
        lambda plan: (plan.batch or 0) < (plan.devices or 1),
        "the global batch is smaller than the number of devices: some would have no sample",
    ),
)
"""What this framework cannot do, each with the reason that a user reads."""


class Torch(Framework):
    """PyTorch on CUDA and CPU devices: one process a device, or one for all (nn.DataParallel)."""

    name: ClassVar[str] = "torch"

    def unsupported(self, workload: Workload, plan: Plan, machine: Machine) -> str | None:
        """The first rule that the plan breaks, or what the workload has against it, or None."""
        broken = next((reason for breaks, reason in RULES if breaks(plan)), None)
        return broken or info(workload.name).unsupported(plan)

    def refuses(self, ablation: Ablation, workload: Workload, plan: Plan) -> str | None:
        """What an experiment cannot take away here."""
        return refusal(ablation, workload, plan) if ablation else None

    def processes(self, plan: Plan) -> int:
        """One process a device, except under nn.DataParallel."""
        return 1 if plan.strategy == "dp" else plan.devices or 1

    def run_rank(self, task: Task, observer: Observer) -> RankSamples:
        """Claim this rank's cores before torch sizes its thread pools, then run."""
        pinned = task.left_out.pinned
        with claimed_cores(task.plan, seen(task).local_rank) if pinned else nullcontext():
            built_in = task.workload.reference is None
            if built_in and info(task.workload.name).kind == "operation":
                from nfold.frameworks.torch.operation import operate

                return operate(task, observer)
            from nfold.frameworks.torch.loop import train

            return train(task, observer)
