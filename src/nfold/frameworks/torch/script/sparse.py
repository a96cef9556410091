"""Sparse tensors, of which PyTorch answers less than of dense ones."""

from __future__ import annotations

import torch
from torch import Tensor


def is_sparse(tensor: Tensor | None) -> bool:
    """Whether it is one, in any of PyTorch's layouts."""
    return tensor is not None and tensor.layout is not torch.strided and not tensor.is_nested


def tensor_bytes(tensor: Tensor) -> int:
    """Its bytes; of coordinates, those of its values and their indices."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.nbytes
