"""Inception-v3: its parameters, shapes and cost, and its loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nfold.core.workload import Workload
from nfold.workloads import info, network, parameters
from nfold.workloads.inception_v3 import BODY, TOP, output_shape
from nfold.workloads.inception_v3.torch import loss, model


def chosen(**changes: int) -> dict[str, int]:
    return parameters(Workload(name="inception_v3").with_parameters(**changes))


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("aux", "expected"), [(1, 27_161_264), (0, 23_834_568)])
def test_it_has_the_published_number_of_parameters(aux: int, expected: int) -> None:
    with torch.device("meta"):
        assert count(model(chosen(aux=aux), 1000)) == expected


def test_its_grids_are_the_published_ones() -> None:
    assert output_shape(BODY, (3, 299, 299)) == (768, 17, 17)
    assert output_shape(BODY + TOP, (3, 299, 299)) == (2048, 8, 8)


@pytest.mark.parametrize("size", [75, 299])
@pytest.mark.parametrize("aux", [0, 1])
def test_the_cost_is_that_of_every_layer(size: int, aux: int) -> None:
    counted = 0

    def note(layer: Any, given: Any, made: Tensor) -> None:
        nonlocal counted
        counted += made.numel() * layer.weight[0].numel()

    with torch.device("meta"):
        module = model(chosen(size=size, aux=aux), 1000)
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.register_forward_hook(note)
        module(torch.empty(2, 3, size, size))
    assert info("inception_v3").flop_per_sample(chosen(size=size, aux=aux)) == 3 * counted


def test_only_training_has_the_auxiliary_logits() -> None:
    module = model(chosen(size=75), 10)
    images = torch.randn(2, 3, 75, 75)
    logits, auxiliary = module(images)
    assert logits.shape == auxiliary.shape == (2, 10)
    assert module.eval()(images).shape == (2, 10)


def test_the_loss_smooths_labels_and_adds_the_auxiliary_head() -> None:
    logits, auxiliary = torch.randn(2, 3, 7).unbind()
    labels = torch.tensor([0, 6, 3])
    target = functional.one_hot(labels, 7) * 0.9 + 0.1 / 7
    alone = -(target * logits.log_softmax(1)).sum(1).mean()
    other = -(target * auxiliary.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss(logits, labels), alone)
    torch.testing.assert_close(loss((logits, auxiliary), labels), alone + 0.4 * other)


def test_a_step_changes_every_parameter() -> None:
    torch.manual_seed(0)
    module = model(chosen(size=75), 10)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    found = loss(module(torch.randn(4, 3, 75, 75)), torch.tensor([1, 2, 3, 4]))
    found.backward()  # type: ignore[no-untyped-call]
    network("inception_v3", "torch").optimizer(module, chosen(size=75)).step()
    pairs = zip(before, module.parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in pairs)
