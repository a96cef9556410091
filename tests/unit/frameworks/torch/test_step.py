"""One update: the usual batch by one way, others by another, weighted; the epoch as a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from nfold.frameworks.torch.batch import Tensors
from nfold.frameworks.torch.forward import Forward
from nfold.frameworks.torch.precision import Precision
from nfold.frameworks.torch.step import Now, Update

CPU = torch.device("cpu")


def _update(weight: torch.nn.Parameter, taken: list[str]) -> Update:
    def way(name: str) -> Forward:
        def forward(tensors: Tensors, epoch: Tensor) -> Tensor:
            taken.append(name)
            return (weight * tensors[0].sum() + epoch).squeeze()

        return forward

    optimizer = torch.optim.SGD([weight], lr=0.1)
    return Update(way("usual"), way("rare"), 4, Precision("fp32", CPU), optimizer)


def test_an_update_follows_the_weighted_gradient_and_returns_the_plain_loss() -> None:
    weight, taken = torch.nn.Parameter(torch.ones(1)), list[str]()
    update = _update(weight, taken)
    loss = update((torch.ones(4),), torch.tensor(2), 1.0)
    assert (float(loss), loss.requires_grad) == (6.0, False)
    assert torch.allclose(weight.detach(), torch.tensor([0.6]))
    update((torch.ones(3),), torch.tensor(0), 0.5)
    assert torch.allclose(weight.detach(), torch.tensor([0.45]))
    assert taken == ["usual", "rare"]
    assert weight.grad is None
    assert update.graph_bytes() == 0


def test_an_epoch_is_made_into_a_tensor_once() -> None:
    now = Now(CPU)
    first = now(3)
    assert (int(first), first.dtype, first.dim()) == (3, torch.int64, 0)
    assert now(3) is first
    assert int(now(4)) == 4
    assert now(first) is first
