from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nfold import workloads
from nfold.core.workload import Workload
from nfold.workloads import torch_networks as definition
from nfold.workloads.networks import CNN10

VALUES = workloads.parameters(Workload.parse("cnn10"))


def test_it_has_1_92_million_parameters() -> None:
    assert sum(p.numel() for p in definition.cnn10_model(VALUES, 10).parameters()) == 1_923_914


def test_it_has_nine_convolutions_and_a_dense_layer() -> None:
    layers = list(definition.cnn10_model(VALUES, 10).modules())
    channels = [layer.out_channels for layer in layers if isinstance(layer, nn.Conv2d)]
    assert channels == [64] * 3 + [128] * 3 + [256] * 3
    assert sum(isinstance(layer, nn.Linear) for layer in layers) == 1
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in layers) == 9


def test_images_become_logits() -> None:
    assert definition.cnn10_model(VALUES, 10)(torch.zeros(3, 3, 32, 32)).shape == (3, 10)


def test_the_cost_is_three_times_that_of_a_forward() -> None:
    module = definition.cnn10_model(VALUES, 10)
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(2, 3, 32, 32))
    assert CNN10.flop_per_sample(VALUES) == 3 * counter.get_total_flops() / 2
    assert CNN10.flop_per_sample(VALUES) == pytest.approx(1.59e9, rel=0.01)


def test_images_are_cropped_and_flipped() -> None:
    assert CNN10.augmentation == (("crop", 4), ("flip", 0))


def test_steps_on_one_batch_bring_its_loss_down() -> None:
    torch.manual_seed(0)
    module = definition.cnn10_model(VALUES, 10)
    optimizer = workloads.network("cnn10", "torch").optimizer(module, VALUES)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = definition.cross_entropy(module(images), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
