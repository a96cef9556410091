"""PyTorch as a framework. Imports no torch: plan rules do not need it."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from typing import ClassVar

from nfold.core.machine import Machine
from nfold.core.measurement import RankSamples
from nfold.core.plan import Plan
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.base import Framework, Observer, Task
from nfold.engines.plan_rules import first_broken_rule, image_file_refusal
from nfold.engines.rank_process import pin_to_cores
from nfold.engines.torch import variant_support
from nfold.engines.torch.torch_rules import workload_rules
from nfold.instrument.script_rank import run_rank as run_script_rank
from nfold.workloads import info, is_operation
from nfold.workloads.workload_info import WorkloadInfo


def _image_file_reason(info: WorkloadInfo, plan: Plan) -> str | None:
    """Return why image files cannot be decoded. The rank checks whether torchvision has nvJPEG."""
    if reason := image_file_refusal(info, plan):
        return reason
    if plan.decode == "device" and find_spec("torchvision") is None:
        return "torchvision, which brings nvJPEG, is not installed; next: --decode cpu"
    return None


class TorchFramework(Framework):
    """PyTorch on CUDA and CPU devices: a process per device, or one for all (nn.DataParallel)."""

    name: ClassVar[str] = "torch"

    def unsupported_reason(self, workload: Workload, plan: Plan, machine: Machine) -> str | None:
        if workload.script:
            return None
        broken = first_broken_rule(workload_rules(plan))
        workload_info = info(workload.name)
        return broken or _image_file_reason(workload_info, plan) or workload_info.unsupported(plan)

    def refusal_reason(self, variant: Variant, workload: Workload, plan: Plan) -> str | None:
        return variant_support.refusal(variant, workload, plan) if variant else None

    def switchable_fields(self, workload: Workload, plan: Plan) -> tuple[str, ...]:
        return variant_support.switchable_fields(workload, plan)

    def process_count(self, plan: Plan) -> int:
        return 1 if plan.strategy == "dp" else plan.devices or 1

    def run_rank(self, task: Task, observer: Observer) -> RankSamples:
        if task.workload.script:
            return run_script_rank(task, observer)
        own, pinned = variant_support.apply_variant(task), task.variant.pinned
        with pin_to_cores(task.plan, own.local_rank) if pinned else nullcontext():
            from nfold.engines.torch.trainer import run_operation, train

            return (run_operation if is_operation(task.workload) else train)(task, observer)
