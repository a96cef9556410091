"""Opening a back end: its environment before the first import of Keras, its errors as nfold's."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from nfold.errors import OutOfMemory, RunFailure
from nfold.frameworks.base import Task
from nfold.frameworks.keras.engine import KerasBackend, KerasDefinition
from nfold.plan import Plan

KERAS_BACKEND_NAMES: dict[str, str] = {
    "tensorflow": "tensorflow",
    "jax": "jax",
    "keras-torch": "torch",
}
"""What Keras calls the back end of a framework."""

OUT_OF_MEMORY_SIGNS = (
    "RESOURCE_EXHAUSTED",
    "ResourceExhausted",
    "OOM when allocating",
    "Out of memory",
)


def backend_environment(plan: Plan, current: dict[str, str]) -> dict[str, str]:
    """What a rank sets before it imports anything of Keras.

    JAX and TensorFlow take the memory of every GPU that they see, so they see the plan's only.
    """
    found = {"KERAS_BACKEND": KERAS_BACKEND_NAMES[plan.framework]}
    if plan.device == "cpu":
        return found | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    seen = current.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(plan.devices or 1)))
    found["CUDA_VISIBLE_DEVICES"] = ",".join(seen.split(",")[: plan.devices])
    if plan.allocation == "growth":
        found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        found["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    return found


def open_backend(task: Task, definition: KerasDefinition) -> KerasBackend:
    """The back end of the task's framework, with its model on its devices."""
    os.environ.update(backend_environment(task.plan, dict(os.environ)))
    module = importlib.import_module(f"nfold.frameworks.keras.on_{task.plan.framework}")
    engine: KerasBackend = module.create_backend(task, definition)
    return engine


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Raise OutOfMemory for what a back end raises in its stead; pass the rest."""
    try:
        yield
    except RunFailure:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError) or any(sign in text for sign in OUT_OF_MEMORY_SIGNS):
            first = text.strip().split("\n")[0][:200]
            raise OutOfMemory(f"out of memory in {name}: {first}") from error
        raise
