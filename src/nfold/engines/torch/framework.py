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
from nfold.engines.plan_rules import Rules, first_broken_rule, image_file_refusal, shared_rules
from nfold.engines.rank_process import pin_to_cores
from nfold.engines.torch import variant_support
from nfold.instrument.script_rank import run_rank as run_script_rank
from nfold.workloads import info, is_operation
from nfold.workloads.workload_info import WorkloadInfo


def torch_rules(plan: Plan) -> Rules:
    """Return what this framework cannot do."""
    step = str(plan.step)
    captured, compiled = "captured" in step, "compiled" in step
    cpu, dp, resident = plan.device == "cpu", plan.strategy == "dp", plan.input == "resident"
    on_cpu, on_device = plan.augment == "cpu", plan.decode == "device"
    synchronised = plan.batch_norm == "synchronised"
    return {
        "step 'graph' is TensorFlow's tf.function; torch's are eager, compiled and captured": (
            step == "graph"
        ),
        "input 'generator' and 'tf.data' are Keras's; next: --input loader or resident": (
            plan.input in ("generator", "tf.data")
        ),
        "strategy 'mirrored' is TensorFlow's, 'data_parallel' JAX's; next: --strategy ddp or nfold": (
            plan.strategy in ("mirrored", "data_parallel")
        ),
        "torch runs several steps per call as one CUDA graph over resident data; next: --step "
        "captured --input resident": (plan.steps_per_execution > 1 and not (captured and resident)),
        "torch already allocates memory on demand; next: omit --allocation": (
            plan.allocation != "default"
        ),
        "a captured step is a CUDA graph: it needs a GPU; next: --step compiled or eager": (
            captured and cpu
        ),
        "a compiled or captured step exchanges gradients itself; next: --strategy nfold": (
            step != "eager" and plan.strategy in ("ddp", "dp")
        ),
        "synchronised batch norm cannot be compiled; next: --step captured or eager": (
            compiled and synchronised
        ),
        "only a compiled step has kernels to tune; next: --step compiled": (
            plan.kernels == "tuned" and not compiled
        ),
        "input 'resident' has no loader whose workers could augment on the CPU; next: "
        "--augment device": resident and on_cpu,
        "images decoded on the device are augmented on the device; next: --augment device": (
            on_device and on_cpu
        ),
        "decoding on the device uses nvJPEG, which needs a GPU; next: --decode cpu": (
            on_device and cpu
        ),
        "a cache of decoded images leaves nothing to decode on the device; next: --decode cpu": (
            on_device and plan.cache == "decoded"
        ),
        "resident photographs are decoded once, on the host; next: --decode cpu": (
            on_device and resident
        ),
        "nn.DataParallel sums gradients on one device: there is no exchange to compress": (
            dp and plan.exchange != "fp32"
        ),
        "nn.DataParallel runs its devices as threads of one process, which cannot wait for each "
        "other inside a layer; next: --strategy ddp or nfold": dp and synchronised,
        "nn.DataParallel needs GPUs; CPU devices are processes; next: --strategy ddp": dp and cpu,
        "DistributedDataParallel compresses on GPUs only; next: --strategy nfold": (
            plan.strategy == "ddp" and plan.exchange == "bf16" and cpu
        ),
        **shared_rules(plan),
    }


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
        broken = first_broken_rule(torch_rules(plan))
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
