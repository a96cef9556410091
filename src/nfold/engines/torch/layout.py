"""Memory layout of images and weights: channels_first (NCHW) or channels_last (NHWC)."""

from __future__ import annotations

import copyreg
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
    return module.to(memory_format=MEMORY_FORMATS[layout])  # type: ignore[call-overload, no-any-return]


def to_layout(images: Tensor, layout: str) -> Tensor:
    """Return images [n, c, h, w] in the layout, without a copy if they have it already."""
    return images.contiguous(memory_format=MEMORY_FORMATS[layout])


class ChangedForward:
    """Base of the classes that ``subclass_with_forward`` makes from ``original``."""

    original: type[nn.Module]


def subclass_with_forward(
    original: type[nn.Module], marker: type, forward: Callable[..., Any]
) -> type[nn.Module]:
    """Return a subclass of ``original`` and ``marker`` with another forward, named like ``original``.

    A copy or a pickle of its objects is of the class ``original``.
    """

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = original.__reduce_ex__(self, protocol)
        parts = (original if one is type(self) else one for one in (reduced[0], *reduced[1]))
        build, *arguments = parts
        if build is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle checks its class
            build = _new_instance
        return (build, tuple(arguments), *reduced[2:])

    body = {"forward": forward, "original": original, "__reduce_ex__": reduce}
    body |= {"__module__": original.__module__, "__doc__": original.__doc__}
    return type(original.__name__, (marker, original), body)


def _new_instance(original: type[nn.Module], *arguments: Any) -> nn.Module:
    return original.__new__(original, *arguments)


ALIGNMENT = 8  # 16-bit numbers of a row that tensor cores read at once
MAX_PATCH = 32  # numbers of a patch up to which a product was measured to be faster


class Im2colMarker(ChangedForward): ...


def use_im2col(module: nn.Module, plan: Plan) -> None:
    """Let compiled code compute convolutions of few channels as matrix products of patches (im2col).

    cuDNN's 16-bit kernels read channels by eights, most of which are padding for the three of an
    image. As a product (K. Chellapilla and others, High Performance Convolutional Neural Networks
    for Document Processing, 2006) the patches, padded to a multiple of eight numbers, are one
    generated kernel and cuBLAS does the remaining work: docs/decisions/kernels-and-layout.md.
    Layers stay the same objects with their names and state. Eager code computes them as before.
    """
    compiled_on_gpu = plan.device == "cuda" and "compiled" in (plan.step or "")
    half = plan.precision in ("bf16", "fp16")
    if not compiled_on_gpu or not half or plan.layout != "channels_last":
        return
    for layer in module.modules():
        if is_eligible(layer):
            layer.__class__ = IM2COL_CLASS


def is_eligible(layer: nn.Module) -> bool:
    """Return whether a layer is a convolution of short patches with stride 1."""
    if type(layer) is not nn.Conv2d or layer.padding_mode != "zeros":
        return False
    dense = layer.stride == layer.dilation == (1, 1) and layer.groups == 1
    short = layer.in_channels < ALIGNMENT and layer.weight[0].numel() <= MAX_PATCH
    return dense and short and not isinstance(layer.padding, str)


def im2col_conv2d(layer: nn.Conv2d, images: Tensor) -> Tensor:
    """Return the convolution of images [n, c, h, w] in channels_last."""
    count, _, height, width = images.shape
    pad_h, pad_w = (int(padding) for padding in layer.padding)
    kernel_h, kernel_w = layer.kernel_size
    patches = functional.unfold(images, (kernel_h, kernel_w), padding=(pad_h, pad_w))
    weights = layer.weight.flatten(1)
    alignment = (0, -weights.shape[1] % ALIGNMENT)
    rows = functional.pad(patches.transpose(1, 2), alignment)
    result = functional.linear(rows, functional.pad(weights, alignment), layer.bias)
    shape = height + 2 * pad_h - kernel_h + 1, width + 2 * pad_w - kernel_w + 1
    return result.view(count, *shape, -1).permute(0, 3, 1, 2)


def _im2col_forward(self: nn.Conv2d, images: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return im2col_conv2d(self, images)
    return nn.Conv2d.forward(self, images)


IM2COL_CLASS = subclass_with_forward(nn.Conv2d, Im2colMarker, _im2col_forward)
