"""Keras on PyTorch: a Keras model is a PyTorch module, trained by PyTorch's own loop.

The layers, their first weights and their mixed precision are Keras's; input, augmentation,
optimizer and timing are those of ``frameworks/torch``, on one device.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from nfold.frameworks.base import Observer, Task
from nfold.frameworks.keras.opened import backend_environment
from nfold.measurement import RankSamples


def train_on_torch(task: Task, observer: Observer) -> RankSamples:
    """Choose the back end, then run PyTorch's loop on Keras's model."""
    os.environ.update(backend_environment(task.plan, dict(os.environ)))
    from nfold.frameworks.torch import loop

    return loop.train(task, observer, torch_definition)


def torch_definition(task: Task) -> Any:
    """PyTorch's definition of the workload, with the model that Keras builds."""
    import keras

    from nfold import workloads
    from nfold.frameworks.keras.model import DTYPE_POLICIES
    from nfold.frameworks.torch.definition import load_workload

    made = load_workload(task)
    keras.config.set_dtype_policy(DTYPE_POLICIES.get(str(task.plan.precision), "float32"))
    keras.utils.set_random_seed(task.plan.seed)
    module = workloads.network(task.workload.name, "keras")
    layout, chosen = str(task.plan.layout), workloads.parameters(task.workload)
    model = module.model(chosen, made.arrays.classes, layout)
    return dataclasses.replace(made, model=wrap_as_torch_module(model, layout))


def wrap_as_torch_module(model: Any, layout: str) -> Any:
    """A module that takes images [n, c, h, w] in the layout's memory, as PyTorch's loop has them.

    Its parameters are the trained weights alone: Keras counts its statistics among them.
    """
    import torch

    from nfold.workloads.keras import head_logits

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            trained = [variable.value for variable in model.trainable_variables]
            self.trained = torch.nn.ParameterList(trained)

        def forward(self, images: torch.Tensor) -> Any:
            """Images to logits; while training to those of all heads."""
            inputs = images.permute(0, 2, 3, 1) if layout == "channels_last" else images
            logits = head_logits(model(inputs, training=self.training))
            return tuple(logits) if self.training and len(logits) > 1 else logits[0]

    return Wrapped()
