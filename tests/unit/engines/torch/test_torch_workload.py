"""A user's own workload: its data as arrays, its loss, its optimizer."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from made import task
from nfold.core.errors import UsageError
from nfold.core.image_augmentation import AUGMENTATIONS as NAMES
from nfold.engines.builtin_workloads import OPERATION_KEYS
from nfold.engines.torch.input.preprocessing import AUGMENTATIONS, Normalizer, build_normalizer
from nfold.engines.torch.precision import Precision
from nfold.engines.torch.torch_workload import TorchWorkload, cross_entropy, load_workload
from nfold.engines.torch.trainer import evaluate

CPU = torch.device("cpu")
MODULE = """
import random
import numpy as np, torch, nfold
IMAGES = np.arange(5 * 4 * 4 * 1).reshape(5, 4, 4, 1).astype(np.uint8)
FLOATS, LABELS = np.random.default_rng(0).normal(size=(5, 3)), np.arange(5) % 2
def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
def base(**given):
    model = torch.nn.Linear(3, given.pop("outputs", 2))
    return nfold.Training(**dict(model=model, train=(FLOATS, LABELS), optimizer=sgd) | given)
def images():
    return base(train=(IMAGES, LABELS))
def constant():
    return base(train=(IMAGES * 0, LABELS))
def drawn():
    noise = torch.rand(1).item() + np.random.rand() + random.random()
    return base(train=(FLOATS + noise, LABELS))
def tested(outputs=2):
    return base(outputs=outputs, test=(FLOATS, LABELS))
def regression():
    return base(outputs=3, train=(FLOATS, FLOATS), test=(FLOATS, FLOATS))
def wide_loss():
    return base(loss=lambda outputs, targets: outputs)
def no_optimizer():
    return base(optimizer=lambda model: None)
"""


@pytest.fixture(autouse=True, scope="module")
def _module(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("own")
    (folder / "defined.py").write_text(MODULE)
    sys.path.insert(0, str(folder))


def made(name: str, seed: int = 0, **changes: Any) -> TorchWorkload:
    return load_workload(task(workload=f"defined:{name}", seed=seed, **changes))


def accuracy(name: str) -> float | None:
    one = made(name)
    ask, normalize = task(), build_normalizer(one.arrays, "channels_first", CPU)
    return evaluate(one.model, one, normalize, Precision("fp32", CPU), ask, lambda: None)


def test_every_operation_of_augmentation_is_there() -> None:
    assert tuple(OPERATION_KEYS) == tuple(AUGMENTATIONS) == NAMES


def test_images_are_normalised_and_other_samples_stay_as_they_are() -> None:
    images, floats = made("images").arrays, made("tested").arrays
    assert isinstance(build_normalizer(images, "channels_first", CPU), Normalizer)
    shown = build_normalizer(images, "channels_first", CPU)(torch.from_numpy(images.train_images))
    assert shown.shape == (5, 1, 4, 4)
    assert shown.mean().abs() < 1e-5
    samples = torch.from_numpy(floats.train_images)
    assert torch.equal(build_normalizer(floats, "channels_last", CPU)(samples), samples)


def test_images_of_one_colour_are_no_division_by_zero() -> None:
    arrays = made("constant").arrays
    shown = build_normalizer(arrays, "channels_first", CPU)(torch.from_numpy(arrays.train_images))
    assert torch.isfinite(shown).all()


def test_what_the_function_draws_follows_from_the_seed() -> None:
    first, again, other = made("drawn"), made("drawn"), made("drawn", seed=1)
    assert np.array_equal(first.arrays.train_images, again.arrays.train_images)
    assert not np.array_equal(first.arrays.train_images, other.arrays.train_images)
    weights = [next(one.model.parameters()) for one in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_accuracy_is_of_class_scores_on_a_test_set_only() -> None:
    found = accuracy("tested")
    assert found is not None
    assert 0 <= found <= 1
    assert accuracy("drawn") is None
    assert accuracy("regression") is None
    assert accuracy("tested:outputs=1") is None


def test_an_evaluation_takes_no_more_at_once_than_a_device_trains_with() -> None:
    assert made("tested", batch=16).evaluation_batch == 16
    assert made("tested", batch=5000).evaluation_batch == 500


def test_cross_entropy_takes_classes_of_any_integers_and_probabilities() -> None:
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    expected = nn.functional.cross_entropy(logits, labels)
    assert torch.equal(cross_entropy(logits, labels.to(torch.uint8)), expected)
    assert torch.equal(cross_entropy(logits.bfloat16(), labels), cross_entropy(
        logits.bfloat16().float(), labels))  # fmt: skip
    one_hot = nn.functional.one_hot(labels, 3).float()
    assert torch.allclose(cross_entropy(logits, one_hot), expected)


def test_a_loss_that_is_no_mean_and_no_optimizer_are_refused() -> None:
    one = made("wide_loss")
    with pytest.raises(UsageError, match=r"loss returned \[4, 2\]"):
        one.loss(torch.zeros(4, 2), torch.zeros(4))
    with pytest.raises(UsageError, match="returned NoneType; allowed is"):
        made("no_optimizer").optimizer(one.model)
