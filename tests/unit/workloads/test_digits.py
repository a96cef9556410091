from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nfold import data, workloads
from nfold.core.workload import Workload
from nfold.workloads import torch_networks as definition
from nfold.workloads.networks import DIGITS

VALUES = workloads.parameters(Workload.parse("digits"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_it_has_49738_parameters() -> None:
    assert sum(p.numel() for p in definition.digits_model(VALUES, 10).parameters()) == 49_738


def test_images_become_logits() -> None:
    assert definition.digits_model(VALUES, 7)(torch.zeros(3, 1, 8, 8)).shape == (3, 7)


def test_the_cost_is_three_times_that_of_a_forward() -> None:
    module = definition.digits_model(VALUES, 10)
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(2, 1, 8, 8))
    assert DIGITS.flop_per_sample(VALUES) == 3 * counter.get_total_flops() / 2


def test_it_needs_no_file_and_draws_nothing_over_its_images() -> None:
    assert (DIGITS.dataset, DIGITS.augmentation) == ("digits", ())
    assert (DIGITS.defaults.batch, DIGITS.defaults.epochs) == (128, 10)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_it_learns_the_digits_in_six_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path))
    arrays = data.load("digits")

    def normal(images: object) -> torch.Tensor:
        scaled = (torch.tensor(images).float() - arrays.mean[0]) / arrays.std[0]
        return scaled.permute(0, 3, 1, 2)

    torch.manual_seed(0)
    module = definition.digits_model(VALUES, arrays.classes)
    optimizer = workloads.network("digits", "torch").optimizer(module, VALUES)
    images, labels = normal(arrays.train_images), torch.tensor(arrays.train_labels)
    for _ in range(6):
        order = torch.randperm(len(labels))
        for start in range(0, len(labels), 128):
            chosen = order[start : start + 128]
            optimizer.zero_grad()
            torch.autograd.backward(
                definition.cross_entropy(module(images[chosen]), labels[chosen])
            )
            optimizer.step()
    predicted = module(normal(arrays.test_images)).argmax(dim=1)
    assert (predicted == torch.tensor(arrays.test_labels)).float().mean() > 0.9
