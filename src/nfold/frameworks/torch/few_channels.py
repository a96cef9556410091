"""Compiled convolutions of few channels as matrix products of patches (im2col).

cuDNN's 16-bit kernels read channels by eights, so that of an image's three most of their work is in
vain. As a product (K. Chellapilla and others, High Performance Convolutional Neural Networks for
Document Processing, 2006) the patches of 3 x 3 x 3 numbers, filled up to a multiple of eight, are
one generated kernel with whatever made the images, and the rest is cuBLAS': docs/decisions/kernels-and-layout.md.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nfold.frameworks.torch.disguise import subclass_with_forward
from nfold.plan import Plan

ALIGNMENT = 8
"""16-bit numbers of a row that tensor cores read at once."""
MAX_PATCH = 32
"""Numbers of a patch up to which a product was measured to be faster."""


class Im2colMarker:
    """Marks convolutions that compiled code computes as products."""

    original: type[nn.Module]


def use_im2col(module: nn.Module, plan: Plan) -> None:
    """Let compiled code compute each convolution of few channels as a product, where that pays.

    Layers stay the same objects with their names and their state, and what is not compiled computes
    them as before.
    """
    half = plan.precision in ("bf16", "fp16")
    last = plan.layout == "channels_last"
    if plan.device != "cuda" or "compiled" not in (plan.step or "") or not (half and last):
        return
    for layer in module.modules():
        if is_eligible(layer):
            layer.__class__ = IM2COL_CLASS


def is_eligible(layer: nn.Module) -> bool:
    """Whether it is a convolution of short patches, one at every place of the image."""
    if type(layer) is not nn.Conv2d or layer.padding_mode != "zeros":
        return False
    plain = layer.stride == layer.dilation == (1, 1) and layer.groups == 1
    short = layer.in_channels < ALIGNMENT and layer.weight[0].numel() <= MAX_PATCH
    return plain and short and not isinstance(layer.padding, str)


def im2col_conv2d(layer: nn.Conv2d, images: Tensor) -> Tensor:
    """What the convolution makes of images [n, c, h, w], channels last."""
    count, _, height, width = images.shape
    above, beside = (int(padding) for padding in layer.padding)
    high, wide = layer.kernel_size
    patches = functional.unfold(images, (high, wide), padding=(above, beside))
    weights = layer.weight.flatten(1)
    filled = (0, -weights.shape[1] % ALIGNMENT)
    rows = functional.pad(patches.transpose(1, 2), filled)
    result = functional.linear(rows, functional.pad(weights, filled), layer.bias)
    places = height + 2 * above - high + 1, width + 2 * beside - wide + 1
    return result.view(count, *places, -1).permute(0, 3, 1, 2)


def _im2col_forward(self: nn.Conv2d, images: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return im2col_conv2d(self, images)
    return nn.Conv2d.forward(self, images)


IM2COL_CLASS = subclass_with_forward(nn.Conv2d, Im2colMarker, _im2col_forward)
