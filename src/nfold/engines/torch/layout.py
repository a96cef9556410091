"""Memory layout of images and weights: channels_first (NCHW) or channels_last (NHWC)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nfold.core.plan import Plan

MEMORY_FORMATS: dict[str, torch.memory_format] = {
    "channels_first": torch.contiguous_format,
    "channels_last": torch.channels_last,
}


def apply_layout(module: nn.Module, layout: str) -> nn.Module:
    """The module with its four-dimensional weights in the layout."""
    return module.to(memory_format=MEMORY_FORMATS[layout])  # type: ignore[call-overload, no-any-return]


def to_layout(images: Tensor, layout: str) -> Tensor:
    """Images [n, c, h, w] in the layout; no copy where they are in it already."""
    return images.contiguous(memory_format=MEMORY_FORMATS[layout])


def subclass_with_forward(
    original: type[nn.Module], marker: type, forward: Callable[..., Any]
) -> type[nn.Module]:
    """A subclass of ``original`` and ``marker`` with another forward, named as ``original`` is.

    So messages read as before. A copy or a pickle of its objects is of ``original`` again.
    """

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = nn.Module.__reduce_ex__(self, protocol)
        return (_new_instance, (original,), *reduced[2:])

    body = {"forward": forward, "original": original, "__reduce_ex__": reduce}
    body |= {"__module__": original.__module__, "__doc__": original.__doc__}
    return type(original.__name__, (marker, original), body)


def _new_instance(original: type[nn.Module]) -> nn.Module:
    return original.__new__(original)


# Compiled convolutions of few channels as matrix products of patches (im2col).
#
# cuDNN's 16-bit kernels read channels by eights, so that of an image's three most of their work is in
# vain. As a product (K. Chellapilla and others, High Performance Convolutional Neural Networks for
# Document Processing, 2006) the patches of 3 x 3 x 3 numbers, filled up to a multiple of eight, are
# one generated kernel with whatever made the images, and the rest is cuBLAS': docs/decisions/kernels-and-layout.md.

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
