from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nfold import workloads
from nfold.core.workload import Workload
from nfold.workloads import torch_networks as definition
from nfold.workloads.networks import MNIST

VALUES = workloads.parameters(Workload.parse("mnist"))


def test_it_has_the_tutorials_3274634_parameters() -> None:
    assert sum(p.numel() for p in definition.mnist_model(VALUES, 10).parameters()) == 3_274_634


def test_it_drops_four_of_ten_before_the_logits() -> None:
    (dropout,) = (
        m for m in definition.mnist_model(VALUES, 10).modules() if isinstance(m, nn.Dropout)
    )
    assert dropout.p == 0.4


def test_images_become_logits() -> None:
    assert definition.mnist_model(VALUES, 10)(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_the_cost_is_three_times_that_of_a_forward() -> None:
    module = definition.mnist_model(VALUES, 10)
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(2, 1, 28, 28))
    assert MNIST.flop_per_sample(VALUES) == 3 * counter.get_total_flops() / 2


def test_its_batch_is_the_tutorials() -> None:
    assert (MNIST.defaults.batch, MNIST.defaults.epochs, MNIST.augmentation) == (100, 3, ())
