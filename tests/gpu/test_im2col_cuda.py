"""A compiled convolution of three channels on a GPU equals cuDNN's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from nfold.core.plan import Plan
from nfold.engines.torch.layout import Im2colMarker, use_im2col

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PLAN = Plan(device="cuda", precision="bf16", layout="channels_last", step="compiled+captured")


def _loss_and_gradients(model: nn.Module, images: Tensor) -> tuple[Tensor, ...]:
    @torch.compile(dynamic=False)
    def forward(given: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            outputs: Tensor = model(given.float() / 255)
        return outputs.float().square().mean()

    loss = forward(images)
    return (loss.detach(), *torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("bias", [False, True])
def test_losses_and_gradients_are_those_of_a_convolution(bias: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 64, 3, padding=1, bias=bias), nn.ReLU(), nn.Conv2d(64, 16, 3)
    model = nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8, device="cuda")
    images = images.contiguous(memory_format=torch.channels_last)
    changed = copy.deepcopy(model)
    use_im2col(changed, PLAN)
    assert isinstance(changed[0], Im2colMarker)
    found, expected = (_loss_and_gradients(one, images) for one in (changed, model))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 2e-2 * other.norm()
