from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nfold import workloads
from nfold.core.errors import UsageError
from nfold.core.workload import Workload
from nfold.workloads import torch_networks as definition
from nfold.workloads.networks import WIDE_RESNET


def values(text: str) -> dict[str, int]:
    return workloads.parameters(Workload.parse(text))


@pytest.mark.parametrize(
    ("text", "millions"),
    [
        ("wide_resnet:depth=40,width=1", 0.6),
        ("wide_resnet:depth=40,width=2", 2.2),
        ("wide_resnet:depth=16,width=8", 11.0),
        ("wide_resnet", 36.5),
    ],
)
def test_it_has_the_papers_parameters(text: str, millions: float) -> None:
    with torch.device("meta"):
        module = definition.wide_resnet_model(values(text), 10)
    count = sum(p.numel() for p in module.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.06)


def test_28_10_has_exactly_36479194_parameters() -> None:
    with torch.device("meta"):
        module = definition.wide_resnet_model(values("wide_resnet"), 10)
    assert sum(p.numel() for p in module.parameters()) == 36_479_194


@pytest.mark.parametrize("depth", [10, 16])
def test_the_depth_counts_its_layers(depth: int) -> None:
    module = definition.wide_resnet_model(values(f"wide_resnet:depth={depth},width=2"), 10)
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    # The paper's 6n + 4: the first, two in every block, and one shortcut in each of three stages.
    assert len(convolutions) == depth
    assert sum(layer.kernel_size == (1, 1) for layer in convolutions) == 3


@pytest.mark.parametrize("text", ["wide_resnet:depth=10,width=1", "wide_resnet:depth=16,width=2"])
def test_images_become_logits_at_three_times_the_forwards_cost(text: str) -> None:
    module = definition.wide_resnet_model(values(text), 7)
    with FlopCounterMode(display=False) as counter:
        assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    cost = WIDE_RESNET.flop_per_sample(values(text))
    assert cost == pytest.approx(3 * counter.get_total_flops() / 2, rel=1e-3)


def test_28_10_costs_31_5_gflop_an_image() -> None:
    assert WIDE_RESNET.flop_per_sample(values("wide_resnet")) == pytest.approx(31.5e9, rel=0.01)


def test_the_stages_halve_the_images_twice() -> None:
    module = definition.wide_resnet_model(values("wide_resnet:depth=10,width=2"), 10)
    assert isinstance(module, nn.Sequential)
    shapes, images = [], torch.zeros(1, 3, 32, 32)
    for layer in module:
        images = layer(images)
        if isinstance(layer, definition.WideResNetBlock):
            shapes.append(tuple(images.shape[1:]))
    assert shapes == [(32, 32, 32), (64, 16, 16), (128, 8, 8)]


@pytest.mark.parametrize(
    ("depth", "nearest"), [(11, "10 and 16"), (27, "22 and 28"), (33, "28 and 34")]
)
def test_another_depth_names_the_nearest_allowed(depth: int, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"depth {depth} is not 6n.*nearest allowed are {nearest}"):
        values(f"wide_resnet:depth={depth}")


@pytest.mark.parametrize("text", ["wide_resnet:depth=4", "wide_resnet:width=0"])
def test_too_small_value_names_minimum(text: str) -> None:
    with pytest.raises(UsageError, match="allowed are whole numbers from"):
        values(text)


def test_steps_on_one_batch_bring_its_loss_down() -> None:
    torch.manual_seed(0)
    chosen = values("wide_resnet:depth=10,width=1")
    module = definition.wide_resnet_model(chosen, 10)
    optimizer = workloads.network("wide_resnet", "torch").optimizer(module, chosen)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = definition.cross_entropy(module(images), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
