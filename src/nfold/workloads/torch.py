"""What the image classification workloads share in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits [n, classes] and labels [n], computed in float32."""
    return functional.cross_entropy(logits.float(), labels)


def sgd(
    module: nn.Module, learning_rate: float, *, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum 0.9 and a fixed rate, one fused kernel where there is one.

    The momentum is there from the start, as zeros: should fp16's first step be skipped, the
    fused kernel would go on from memory that nobody has filled (torch 2.13).
    """
    optimizer = torch.optim.SGD(
        module.parameters(),
        lr=learning_rate,
        momentum=0.9,
        nesterov=True,
        weight_decay=weight_decay,
        fused=True,
    )
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer
