"""Keras 3 behind the seam. Imports no back end: what it cannot do is known without one."""

from __future__ import annotations

from typing import ClassVar

from nfold.frameworks.base import Framework, Observer, Task
from nfold.frameworks.cores import claimed_cores
from nfold.frameworks.files import unsuited
from nfold.frameworks.keras.installed import check_installed, without_cuda
from nfold.frameworks.keras.rules import broken
from nfold.machine import Machine
from nfold.measurement import RankSamples
from nfold.plan import Plan
from nfold.workload import Workload
from nfold.workloads import info


class Keras(Framework):
    """One process drives all devices, because Keras chooses its back end once, at import."""

    keeps: ClassVar[bool] = False

    def unsupported(self, workload: Workload, plan: Plan, machine: Machine) -> str | None:
        """The first rule that the plan breaks, or None; ExtraMissing where it is not installed."""
        if workload.reference is not None:
            return f"{workload.name} is written in PyTorch; next: --framework torch"
        check_installed(self.name)
        known = info(workload.name)
        if known.kind == "operation":
            return f"{workload.name} is written for torch only; next: --framework torch"
        blind = without_cuda(self.name) if plan.device == "cuda" else None
        return blind or unsuited(known, plan) or broken(plan) or known.unsupported(plan)

    def processes(self, plan: Plan) -> int:
        """One, whatever the plan."""
        return 1

    def run_rank(self, task: Task, observer: Observer) -> RankSamples:
        """Claim the cores of all CPU devices, then choose the back end and import it."""
        with claimed_cores(task.plan, 0, task.plan.devices or 1):
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

    def run_rank(self, task: Task, observer: Observer) -> RankSamples:
        """Claim the device's cores, then run PyTorch's loop on Keras's model."""
        with claimed_cores(task.plan, 0):
            from nfold.frameworks.keras.on_torch import train

            return train(task, observer)
