"""A model and its optimizer in Keras, as a plan asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from nfold.frameworks.base import Task
from nfold.frameworks.keras.engine import Definition
from nfold.frameworks.keras.prepare import Normalize, normalizer
from nfold.frameworks.keras.rate import OneCycle
from nfold.frameworks.stream import Stream, step_limit
from nfold.workloads.keras import MixedSGD

POLICIES: dict[str, str] = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
"""Keras's name of a precision; fp32 and tf32 compute in float32."""


@dataclass(frozen=True)
class Built:
    """``normalize`` makes the model's input of stored images; ``loss`` is of outputs and labels."""

    model: Any
    optimizer: Any
    normalize: Normalize
    loss: Callable[[Any, Any], Any]

    def state(self) -> tuple[list[Any], list[Any], list[Any]]:
        """The first values of all variables: trained, others, the optimizer's."""
        kinds = (
            self.model.trainable_variables,
            self.model.non_trainable_variables,
            self.optimizer.variables,
        )
        trained, others, optimizer = ([v.value for v in variables] for variables in kinds)
        return trained, others, optimizer

    def scaled(self, loss: Any, optimizer: list[Any]) -> Any:
        """The loss as its gradient is taken: under fp16 times the scale that is in the state."""
        mapping = list(zip(self.optimizer.variables, optimizer, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return self.optimizer.scale_loss(loss)


def built(task: Task, made: Definition) -> Built:
    """The model with the weights of the plan's seed, its optimizer built."""
    plan = task.plan
    keras.config.set_dtype_policy(POLICIES.get(str(plan.precision), "float32"))
    keras.utils.set_random_seed(plan.seed)
    model = made.model(str(plan.layout))
    optimizer = made.optimizer(_schedule(task, made))
    if plan.precision == "fp16":
        optimizer = MixedSGD(optimizer)
    optimizer.build(model.trainable_variables)
    return Built(model, optimizer, normalizer(made.arrays, str(plan.layout)), made.loss)


def _schedule(task: Task, made: Definition) -> OneCycle | None:
    if not made.peak:
        return None
    samples, limit = len(made.arrays.train_labels), step_limit(task.plan)
    stream = Stream(samples, task.plan, rank=0, ranks=1, limit=limit)
    return OneCycle(made.peak, (task.plan.epochs or 1) * len(stream))
