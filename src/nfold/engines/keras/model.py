"""A plan's Keras model, optimizer and learning rate schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from nfold.engines.base import Task
from nfold.engines.builtin_workloads import WARMUP_FRACTION
from nfold.engines.keras.backend import KerasDefinition
from nfold.engines.keras.preprocessing import Normalize, build_normalizer
from nfold.engines.sampling import EpochSampler, step_limit
from nfold.workloads.keras_networks import MixedSGD

# Keras's name of a precision; fp32 and tf32 compute in float32
DTYPE_POLICIES: dict[str, str] = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


@dataclass(frozen=True)
class KerasModel:
    """``normalize`` converts uint8 images to the model's input; ``loss`` takes outputs, labels."""

    model: Any
    optimizer: Any
    normalize: Normalize
    loss: Callable[[Any, Any], Any]

    def initial_state(self) -> tuple[list[Any], list[Any], list[Any]]:
        return (
            [variable.value for variable in self.model.trainable_variables],
            [variable.value for variable in self.model.non_trainable_variables],
            [variable.value for variable in self.optimizer.variables],
        )

    def scale_loss(self, loss: Any, optimizer: list[Any]) -> Any:
        """Multiply the loss by fp16's scale in the optimizer's state."""
        mapping = list(zip(self.optimizer.variables, optimizer, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return self.optimizer.scale_loss(loss)


def build_model(task: Task, definition: KerasDefinition) -> KerasModel:
    plan = task.plan
    keras.config.set_dtype_policy(DTYPE_POLICIES.get(str(plan.precision), "float32"))
    keras.utils.set_random_seed(plan.seed)
    model = definition.model(str(plan.layout))
    optimizer = definition.optimizer(_one_cycle(task, definition))
    if plan.precision == "fp16":
        optimizer = MixedSGD(optimizer)
    optimizer.build(model.trainable_variables)
    return KerasModel(
        model, optimizer, build_normalizer(definition.arrays, str(plan.layout)), definition.loss
    )


def _one_cycle(task: Task, definition: KerasDefinition) -> KerasOneCycle | None:
    if not definition.peak_rate:
        return None
    samples, limit = len(definition.arrays.train_labels), step_limit(task.plan)
    stream = EpochSampler(samples, task.plan, rank=0, ranks=1, limit=limit)
    return KerasOneCycle(definition.peak_rate, (task.plan.epochs or 1) * len(stream))


class KerasOneCycle(keras.optimizers.schedules.LearningRateSchedule):
    """The schedule of ``engines/torch/lr_schedule.py``; ``steps`` are of the whole training."""

    def __init__(self, peak: float, steps: int) -> None:
        self.peak, self.steps = peak, steps

    def __call__(self, step: Any) -> Any:
        progress = (ops.cast(step, "float32") + 0.5) / self.steps
        rising, falling = progress / WARMUP_FRACTION, (1 - progress) / (1 - WARMUP_FRACTION)
        return self.peak * ops.where(progress < WARMUP_FRACTION, rising, falling)

    def get_config(self) -> dict[str, Any]:
        return {"peak": self.peak, "steps": self.steps}
