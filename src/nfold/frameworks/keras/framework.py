"""Keras 3 behind the seam. Imports no back end: what it cannot do is known without one."""

from __future__ import annotations

from typing import ClassVar

from nfold.frameworks.base import Framework, Observer, Task
from nfold.frameworks.cores import pin_to_cores
from nfold.frameworks.files import image_file_refusal
from nfold.frameworks.keras.installed import check_installed, missing_cuda_reason
from nfold.frameworks.keras.rules import violated_rule
from nfold.machine import Machine
from nfold.measurement import RankSamples
from nfold.plan import Plan
from nfold.workload import Workload
from nfold.workloads import info, is_operation


class Keras(Framework):
    """One process drives all devices, because Keras chooses its back end once, at import."""

    supports_checkpoints: ClassVar[bool] = False
    supports_operations: ClassVar[bool] = True
    """Whether operations are written for it."""

    def unsupported_reason(self, workload: Workload, plan: Plan, machine: Machine) -> str | None:
        """The first rule that the plan breaks, or None; ExtraMissing where it is not installed."""
        if workload.function_reference is not None or workload.script:
            return f"{workload.name} is written in PyTorch; next: --framework torch"
        check_installed(self.name)
        known = info(workload.name)
        operation = is_operation(workload)
        if operation and not self.supports_operations:
            return f"{workload.name} is not written for {self.name}; next: --framework torch"
        blind = missing_cuda_reason(self.name) if plan.device == "cuda" else None
        refused = image_file_refusal(known, plan) or violated_rule(plan, operation=operation)
        return blind or refused or known.unsupported(plan)

    def process_count(self, plan: Plan) -> int:
        """One, whatever the plan."""
        return 1

    def run_rank(self, task: Task, observer: Observer) -> RankSamples:
        """Claim the cores of all CPU devices, then choose the back end and import it."""
        with pin_to_cores(task.plan, 0, task.plan.devices or 1):
            if is_operation(task.workload):
                from nfold.frameworks.keras.operation import run_operation

                return run_operation(task, observer)
            from nfold.frameworks.keras.loop import train

            return train(task, observer)


class TensorFlow(Keras):
    """Keras on TensorFlow."""

    name: ClassVar[str] = "tensorflow"


class Jax(Keras):
    """Keras on JAX."""

    name: ClassVar[str] = "jax"


class KerasTorch(Keras):
    """Keras on PyTorch."""

    name: ClassVar[str] = "keras-torch"
    supports_operations: ClassVar[bool] = False

    def run_rank(self, task: Task, observer: Observer) -> RankSamples:
        """Claim the device's cores, then run PyTorch's loop on Keras's model."""
        with pin_to_cores(task.plan, 0):
            from nfold.frameworks.keras.on_torch import train_on_torch

            return train_on_torch(task, observer)
