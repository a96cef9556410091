"""Memory layout of images and weights: channels_first (NCHW) or channels_last (NHWC)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
