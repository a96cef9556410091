"""The same workload is the same work: Keras's back ends give what PyTorch gives.

Every back end runs in a process of its own and leaves its answers in a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

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
from nfold.data import prepare
from nfold.engines import builtin_workloads
from nfold.engines.base import Observer
from nfold.engines.builtin_workloads import one_cycle
from nfold.engines.torch.batch import CanvasTensors
from nfold.engines.torch.devices import open_devices
from nfold.engines.torch.input.preprocessing import DeviceDistortion
from nfold.engines.torch.trainer import Trainer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]
CHILD = Path(__file__).parent / "scripts" / "keras_child.py"
TESTS = Path(__file__).parents[1]
FRAMEWORKS = [
    pytest.param(name, marks=pytest.mark.slow(f"Keras on {name}")) for name in ("tensorflow", "jax")
]
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
"""Compiling takes most of the time of a program that runs once."""

Answers = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with PyTorch's first weights of every case."""
    folder = tmp_path_factory.mktemp("keras")
    for name in ("mnist", "cifar10"):
        prepare(name, None)
    found: Answers = {}
    for case in CASES:
        torch.manual_seed(0)
        model, _ = case.built("torch")
        found |= {f"{case.workload}|{name}": v.numpy() for name, v in model.state_dict().items()}
    np.savez(folder / "asked.npz", allow_pickle=False, **found)
    return folder


@pytest.fixture(scope="module", params=FRAMEWORKS)
def answers(request: pytest.FixtureRequest, states: Path) -> Answers:
    """What one back end answers."""
    pytest.importorskip(request.param)
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(CHILD), request.param, str(states)],
        env={**os.environ, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "2", **QUICK},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(np.load(states / f"{request.param}.npz"))


def distance(got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """The length of the difference, as a part of what was expected."""
    assert got.shape == expected.shape
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def differentiated(case: Case, dtype: torch.dtype) -> Answers:
    """PyTorch's logits of every head and the gradients of all its parameters."""
    torch.manual_seed(0)
    model, loss = case.built("torch")
    model.train(case.training).to(dtype)
    model.training = True  # of Inception-v3 itself: it gives both heads' logits, its layers are not
    images, labels = case.batch()
    outputs = model(torch.from_numpy(images).to(dtype))
    loss(outputs, torch.from_numpy(labels)).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    heads = outputs if isinstance(outputs, tuple) else (outputs,)
    found |= {f"logits{head}": logits for head, logits in enumerate(heads)}
    return {name: value.detach().numpy() for name, value in found.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.workload.partition(":")[0])
def test_logits_gradients_and_counts_agree(answers: Answers, case: Case) -> None:
    """As near to PyTorch in float64 as PyTorch in float32 is, times three.

    A rounding that moves one value across a ReLU's zero moves every gradient before it.
    """
    exact, single = differentiated(case, torch.float64), differentiated(case, torch.float32)
    rounding = 0.0 if case.exact else max(distance(single[name], exact[name]) for name in exact)
    assert rounding < 0.01
    for layout in case.layouts:
        part = f"{case.workload}|{layout}|"
        heads = [name for name in exact if name.startswith("logits")]
        assert all(distance(answers[part + name], exact[name]) < 1e-4 for name in heads), layout
        sizes = [value.size for name, value in exact.items() if name not in heads]
        assert int(answers[part + "count"]) == sum(sizes)
        for name, expected in exact.items():
            assert distance(answers[part + name], expected) < 1e-4 + 3 * rounding, (layout, name)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.steps],
    ids=lambda case: case.workload.partition(":")[0],
)
def test_losses_of_the_first_steps_agree(answers: Answers, case: Case) -> None:
    """From equal weights: the last of them is of the incomplete batch of an epoch."""
    task = case.task("torch")
    trainer = Trainer(task, open_devices(task))
    seen = trainer.run(Observer())
    expected = losses(seen.losses)
    assert len(expected) == STEPS
    for layout in case.steps:
        got = answers[f"{case.workload}|{layout}|losses"]
        assert np.allclose(got, expected, rtol=2e-3), (layout, got, expected)


def losses(points: tuple[tuple[int, float], ...]) -> list[float]:
    return [loss for _, loss in points]


def test_the_device_augments_to_the_same_pixels(answers: Answers) -> None:
    arrays, ids = augmented_arrays()
    augmented = builtin_workloads.build_augmentation(OPERATIONS, arrays, 2**33 + 5)
    expected = augmented(arrays.train_images, ids.astype(np.int64), 3)
    assert np.array_equal(answers[AUGMENTED], expected)


def test_the_device_distorts_to_the_same_pixels_up_to_rounding(answers: Answers) -> None:
    images, numbers = boxed()
    canvases, marks = torch.from_numpy(images), torch.from_numpy(numbers.astype(np.int64))
    samples = CanvasTensors(canvases, marks[:, 0], marks[:, 0], marks[:, 1:])
    distort = DeviceDistortion(DISTORTED_SIZE, 9, torch.device("cpu"))
    apart = np.abs(answers[DISTORTED].astype(int) - distort(samples, torch.tensor(2)).numpy())
    assert apart.mean() < 0.01
    assert apart.max() <= 4


def test_the_rate_goes_the_same_way(answers: Answers) -> None:
    expected = [PEAK * one_cycle((step + 0.5) / 10) for step in range(10)]
    assert np.allclose(answers[RATED], expected, rtol=1e-5)
