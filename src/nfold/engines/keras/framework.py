"""Keras 3 as a framework, with the rules for its plans. Imports no back end."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import ClassVar

from nfold.core.errors import ExtraMissing
from nfold.core.machine import Machine
from nfold.core.measurement import RankSamples
from nfold.core.plan import FRAMEWORK_STRATEGY, Plan
from nfold.core.workload import Workload
from nfold.engines.base import Framework, Observer, Task
from nfold.engines.plan_rules import Rules, first_broken_rule, image_file_refusal, shared_rules
from nfold.engines.rank_process import pin_to_cores
from nfold.workloads import info, is_operation


class Keras(Framework):
    """One process drives all devices. Keras selects its back end once, at import."""

    supports_checkpoints: ClassVar[bool] = False
    supports_operations: ClassVar[bool] = True  # whether operations are written for it

    def unsupported_reason(self, workload: Workload, plan: Plan, machine: Machine) -> str | None:
        if workload.function_reference is not None or workload.script:
            return f"{workload.name} is written in PyTorch; next: --framework torch"
        check_installed(self.name)
        workload_info = info(workload.name)
        operation = is_operation(workload)
        if operation and not self.supports_operations:
            return f"{workload.name} is not available on {self.name}; next: --framework torch"
        return (
            (missing_cuda_reason(self.name) if plan.device == "cuda" else None)
            or image_file_refusal(workload_info, plan)
            or violated_rule(plan, operation=operation)
            or workload_info.unsupported(plan)
        )

    def process_count(self, plan: Plan) -> int:
        return 1

    def run_rank(self, task: Task, observer: Observer) -> RankSamples:
        with pin_to_cores(task.plan, 0, task.plan.devices or 1):
            from nfold.engines.keras.trainer import run_operation, train

            return (run_operation if is_operation(task.workload) else train)(task, observer)


class TensorFlow(Keras):
    name: ClassVar[str] = "tensorflow"


class Jax(Keras):
    name: ClassVar[str] = "jax"


class KerasTorch(Keras):
    name: ClassVar[str] = "keras-torch"
    supports_operations: ClassVar[bool] = False

    def run_rank(self, task: Task, observer: Observer) -> RankSamples:
        with pin_to_cores(task.plan, 0):
            from nfold.engines.keras.trainer import train_on_torch

            return train_on_torch(task, observer)


# the library of a framework besides Keras, and the extra with both
REQUIREMENTS: dict[str, tuple[str, str]] = {
    "tensorflow": ("tensorflow", "tensorflow"),
    "jax": ("jax", "jax"),
    "keras-torch": ("keras", "keras"),
}

JAX_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
TENSORFLOW_WITHOUT_CUDA = ("tensorflow-cpu", "tensorflow-cpu-aws", "tensorflow-intel")


def check_installed(framework: str) -> None:
    library, extra = REQUIREMENTS[framework]
    for name in (library, "keras"):
        if find_spec(name) is None:
            raise ExtraMissing(name, extra)


def missing_cuda_reason(framework: str) -> str | None:
    """Return why a framework's installed build does not support GPUs, or None."""
    if framework == "tensorflow":
        built = next((name for name in TENSORFLOW_WITHOUT_CUDA if installed_version(name)), None)
        if built and not installed_version("tensorflow"):
            return (
                f"{built} {installed_version(built)} is built without CUDA; next: --framework jax "
                "or torch, or --device cpu"
            )
    if framework == "jax" and not any(map(installed_version, JAX_PLUGINS)):
        return (
            f"jax {installed_version('jax')} is installed without its CUDA plugin "
            f"({' or '.join(JAX_PLUGINS)}); next: pip install 'jax[cuda13]', or --device cpu"
        )
    return None


def installed_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


STEP_KINDS: dict[str, tuple[str, ...]] = {
    "tensorflow": ("eager", "graph", "compiled"),
    "jax": ("compiled",),
    "keras-torch": ("eager", "compiled"),
}


def framework_rules(plan: Plan, *, operation: bool) -> Rules:
    if plan.framework == "tensorflow":
        return {
            "TensorFlow on a CPU: 'The Conv2D op currently only supports the NHWC tensor format on "
            "the CPU'; next: --layout channels_last, or --step compiled (XLA can)": (
                (plan.device, plan.layout) == ("cpu", "channels_first") and plan.step != "compiled"
            ),
            "MirroredStrategy computes batch norm per replica; next: --framework torch": (
                plan.batch_norm == "synchronised"
            ),
            "an eager step is one execution; next: --step graph or compiled": (
                plan.steps_per_execution > 1 and plan.step == "eager"
            ),
        }
    if plan.framework == "jax":
        return {
            # Of a program over all devices; an operation's devices have a program each.
            "JAX splits a batch into equal parts: it must be a multiple of the number of devices": (
                not operation and (plan.batch or 0) % (plan.devices or 1) != 0
            ),
            "input 'tf.data' is TensorFlow's; next: --input loader or generator": (
                plan.input == "tf.data"
            ),
        }
    return {
        "Keras's torch back end uses one device; next: --framework torch": (plan.devices or 1) > 1,
        "input 'generator' and 'tf.data' are for --framework tensorflow or jax; next: "
        "--input loader": plan.input not in ("loader", "resident"),
        "steps_per_execution above 1 needs a loop in a graph; next: --framework tensorflow or jax": (
            plan.steps_per_execution > 1
        ),
    }


def keras_rules(plan: Plan) -> Rules:
    return {
        "accumulate above 1 is torch's; next: --framework torch": plan.accumulate > 1,
        "Keras exchanges gradients only in float32; next: --framework torch": (
            plan.exchange != "fp32"
        ),
        "kernels 'tuned' is a mode of torch.compile; next: --framework torch": (
            plan.kernels == "tuned"
        ),
        "Keras loads its input in one thread, without workers; next: --workers 0": (
            bool(plan.workers) and plan.decode is None
        ),
        "decoding on the device needs PyTorch (nvJPEG); next: --decode cpu": (
            plan.decode == "device"
        ),
        "input 'resident' does not pass through the host, so it cannot be augmented there; next: "
        "--augment device": plan.input == "resident" and plan.augment == "cpu",
        **shared_rules(plan),
    }


def violated_rule(plan: Plan, *, operation: bool = False) -> str | None:
    steps = STEP_KINDS[plan.framework]
    if plan.step not in steps:
        return f"{plan.framework} has no step {plan.step!r}; allowed are {', '.join(steps)}"
    strategy = FRAMEWORK_STRATEGY.get(plan.framework)
    if (plan.devices or 1) > 1 and strategy and plan.strategy != strategy:
        return f"{plan.framework} has no strategy {plan.strategy!r}; allowed is {strategy}"
    return first_broken_rule({**framework_rules(plan, operation=operation), **keras_rules(plan)})
