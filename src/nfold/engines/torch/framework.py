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
from nfold.engines.plan_rules import (
    MIN_BATCH_RULE,
    PRECISION_RULES,
    Rule,
    first_broken_rule,
    image_file_refusal,
)
from nfold.engines.rank_process import pin_to_cores
from nfold.engines.torch.variant_support import (
    apply_variant,
    script_refusal,
    switchable_fields,
    workload_refusal,
)
from nfold.instrument.script_rank import run_rank as run_script_rank
from nfold.workloads import info, is_operation
from nfold.workloads.workload_info import WorkloadInfo

GPU_DECODER_PACKAGE = "torchvision, which brings nvJPEG,"
# What this framework cannot do, each with its message.
TORCH_PLAN_RULES: tuple[Rule, ...] = (
    (
        lambda plan: plan.step == "graph",
        "step 'graph' is TensorFlow's tf.function; torch's are eager, compiled and captured",
    ),
    (
        lambda plan: plan.input in ("generator", "tf.data"),
        "input 'generator' and 'tf.data' are Keras's; next: --input loader or resident",
    ),
    (
        lambda plan: plan.strategy in ("mirrored", "data_parallel"),
        "strategy 'mirrored' is TensorFlow's, 'data_parallel' JAX's; next: --strategy ddp or nfold",
    ),
    (
        lambda plan: (
            plan.steps_per_execution > 1
            and ("captured" not in str(plan.step) or plan.input != "resident")
        ),
        "torch runs several steps per call as one CUDA graph over resident data; next: --step "
        "captured --input resident",
    ),
    (
        lambda plan: plan.allocation != "default",
        "torch already allocates memory on demand; next: omit --allocation",
    ),
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
        lambda plan: plan.decode == "device" and plan.augment == "cpu",
        "images decoded on the device are augmented on the device; next: --augment device",
    ),
    (
        lambda plan: plan.decode == "device" and plan.device == "cpu",
        "decoding on the device uses nvJPEG, which needs a GPU; next: --decode cpu",
    ),
    (
        lambda plan: plan.decode == "device" and plan.cache == "decoded",
        "a cache of decoded images leaves nothing to decode on the device; next: --decode cpu",
    ),
    (
        lambda plan: plan.decode == "device" and plan.input == "resident",
        "resident photographs are decoded once, on the host; next: --decode cpu",
    ),
    (
        lambda plan: plan.strategy == "dp" and plan.exchange != "fp32",
        "nn.DataParallel sums gradients on one device: there is no exchange to compress",
    ),
    (
        lambda plan: plan.strategy == "dp" and plan.batch_norm == "synchronised",
        "nn.DataParallel runs its devices as threads of one process, which cannot wait for each "
        "other inside a layer; next: --strategy ddp or nfold",
    ),
    (
        lambda plan: plan.strategy == "dp" and plan.device == "cpu",
        "nn.DataParallel needs GPUs; CPU devices are processes; next: --strategy ddp",
    ),
    (
        lambda plan: plan.strategy == "ddp" and plan.exchange == "bf16" and plan.device == "cpu",
        "DistributedDataParallel compresses on GPUs only; next: --strategy nfold",
    ),
    *PRECISION_RULES,
    MIN_BATCH_RULE,
)


def _image_file_reason(info: WorkloadInfo, plan: Plan) -> str | None:
    if reason := image_file_refusal(info, plan):
        return reason
    if plan.decode == "device" and not has_gpu_decoder():
        return f"{GPU_DECODER_PACKAGE} is not installed; next: --decode cpu"
    return None


def has_gpu_decoder() -> bool:
    """Return whether torchvision is installed; the rank checks whether it has nvJPEG."""
    return find_spec("torchvision") is not None


class TorchFramework(Framework):
    """PyTorch on CUDA and CPU devices: a process per device, or one for all (nn.DataParallel)."""

    name: ClassVar[str] = "torch"

    def unsupported_reason(self, workload: Workload, plan: Plan, machine: Machine) -> str | None:
        if workload.script:
            return None
        broken = first_broken_rule(TORCH_PLAN_RULES, plan)
        workload_info = info(workload.name)
        return broken or _image_file_reason(workload_info, plan) or workload_info.unsupported(plan)

    def refusal_reason(self, variant: Variant, workload: Workload, plan: Plan) -> str | None:
        refuse = script_refusal if workload.script else workload_refusal
        return refuse(variant, workload, plan) if variant else None

    def switchable_fields(self, workload: Workload, plan: Plan) -> tuple[str, ...]:
        return switchable_fields(workload, plan)

    def process_count(self, plan: Plan) -> int:
        return 1 if plan.strategy == "dp" else plan.devices or 1

    def run_rank(self, task: Task, observer: Observer) -> RankSamples:
        if task.workload.script:
            return run_script_rank(task, observer)
        pinned = task.variant.pinned
        with pin_to_cores(task.plan, apply_variant(task).local_rank) if pinned else nullcontext():
            if is_operation(task.workload):
                from nfold.engines.torch.operation import run_operation

                return run_operation(task, observer)
            from nfold.engines.torch.trainer import train

            return train(task, observer)
