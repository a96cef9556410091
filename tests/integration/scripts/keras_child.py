"""One back end of Keras answers what PyTorch was asked too: python keras_child.py FRAMEWORK FOLDER.

Reads ``asked.npz`` of the folder, writes ``FRAMEWORK.npz``: logits, losses and gradients of every
model in every layout that the back end has, losses of the first steps, augmented and
distorted images, rates.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_cases import (
    AUGMENTED,
    CASES,
    DISTORTED,
    DISTORTED_SIZE,
    OPERATIONS,
    PEAK,
    RATED,
    STEPS,
    Case,
    augmented_arrays,
    boxed,
)
from keras_weights import give, layers, names_of, to_torch
from nfold.engines.base import Task
from nfold.engines.keras import trainer
from nfold.engines.keras.backend import KerasDefinition, load_definition
from nfold.engines.keras.input import open_input

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


class Given(KerasDefinition):
    """A definition whose model has PyTorch's first weights."""

    def model(self, layout: str) -> Any:
        made = super().model(layout)
        give(made, STATES[str(self.workload)])
        return made


def main(framework: str, folder: Path) -> None:
    os.environ.update(trainer.backend_environment(CASES[0].task(framework).plan, dict(os.environ)))
    asked = dict(np.load(folder / "asked.npz"))
    for name, value in asked.items():
        workload, _, weight = name.partition("|")
        STATES.setdefault(workload, {})[weight] = value
    found: Arrays = {}
    for case in CASES:
        for layout in case.steps:
            task = case.task(framework, layout=layout)
            found[f"{case.workload}|{layout}|losses"] = losses(task)
    found |= augmented() | distorted() | rates()
    for case in CASES:
        for layout in case.layouts:
            found |= gradients(case, framework, layout)
    np.savez(folder / f"{framework}.npz", allow_pickle=False, **found)


STATES: dict[str, Arrays] = {}


def given(task: Task) -> Given:
    made = load_definition(task)
    return Given(**vars(made))


def gradients(case: Case, framework: str, layout: str) -> Arrays:
    """Logits, and the gradients of the loss by PyTorch's names; statistics after one batch."""
    precise(framework, case.exact)
    model, loss = case.built("keras", layout)
    give(model, STATES[case.workload])
    images, labels = case.batch()
    images = images.astype(np.float64) if case.exact else images
    inputs = images if layout == "channels_first" else images.transpose(0, 2, 3, 1)
    differentiate = on_tensorflow if framework == "tensorflow" else on_jax
    values = differentiate(model, loss, inputs, labels, case.training)
    kept = {f"logits{head}": values.pop(0) for head in range(len(model.outputs))}
    trained = [weight.path for weight in model.trainable_variables]
    by_path = dict(zip(trained, values, strict=True))
    for layer in layers(model):
        for name, weight in zip(names_of(layer), layer.weights, strict=True):
            if weight.path in by_path:
                kept[name] = to_torch(model, layer, by_path[weight.path])
    kept["count"] = np.array(model.count_params() - sum(w.shape[0] for w in statistics(model)))
    precise(framework, False)
    return {f"{case.workload}|{layout}|{name}": value for name, value in kept.items()}


def precise(framework: str, wide: bool) -> None:
    """Compute in float64 from here on, or in float32 again."""
    import keras

    keras.config.set_dtype_policy("float64" if wide else "float32")
    if framework == "jax":
        import jax

        jax.config.update("jax_enable_x64", wide)


def statistics(model: Any) -> list[Any]:
    return [weight for weight in model.non_trainable_variables if "moving" in weight.path]


def on_tensorflow(
    model: Any, loss: Any, inputs: Array, labels: Array, training: bool
) -> list[Array]:
    import tensorflow as tf

    from nfold.workloads.keras_networks import head_logits

    def run() -> Any:
        with tf.GradientTape() as tape:
            outputs = model(tf.constant(inputs), training=training)
            value = loss(outputs, labels)
        return [*head_logits(outputs), *tape.gradient(value, model.trainable_variables)]

    channels_first = inputs.shape[1] < inputs.shape[3]  # only XLA can, on a CPU
    return [value.numpy() for value in tf.function(run, jit_compile=channels_first)()]


def on_jax(model: Any, loss: Any, inputs: Array, labels: Array, training: bool) -> list[Array]:
    import jax

    from nfold.workloads.keras_networks import head_logits

    trained = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]

    def value(trained: Any) -> Any:
        outputs, _ = model.stateless_call(trained, others, inputs, training=training)
        return loss(outputs, labels), head_logits(outputs)

    found, logits = jax.jit(jax.grad(value, has_aux=True))(trained)
    return [np.asarray(one) for one in (*logits, *found)]


def losses(task: Task) -> Array:
    """Of the first steps, from PyTorch's first weights, by the product's own engine."""
    made = given(task)
    engine = trainer.open_backend(task, made)
    source = open_input(made, task, engine)
    kept = [call.run() for call, _ in zip(source, range(STEPS), strict=False)]
    return np.array(engine.read_losses(kept)[:STEPS])


def augmented() -> Arrays:
    """Images augmented by a jitted function on the device."""
    from keras import ops

    from nfold.engines.keras.preprocessing import build_augmentation

    arrays, ids = augmented_arrays()
    augment = build_augmentation(OPERATIONS, arrays, seed=2**33 + 5)
    inputs = ops.convert_to_tensor(arrays.train_images), ops.convert_to_tensor(ids, "uint32")
    return {AUGMENTED: np.asarray(augment(*inputs, ops.convert_to_tensor(3, "uint32")))}


def distorted() -> Arrays:
    """Canvases distorted on the device."""
    from keras import ops

    from nfold.engines.keras.preprocessing import KerasDistortion

    canvases, marks = boxed()
    distort = KerasDistortion(DISTORTED_SIZE, seed=9)
    inputs = ops.convert_to_tensor(canvases), ops.convert_to_tensor(marks, "uint32")
    return {DISTORTED: np.asarray(distort(*inputs, ops.convert_to_tensor(2, "uint32")))}


def rates() -> Arrays:
    """One cycle of the learning rate."""
    from nfold.engines.keras.model import KerasOneCycle

    schedule = KerasOneCycle(PEAK, 10)
    return {RATED: np.array([float(np.asarray(schedule(step))) for step in range(10)])}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
