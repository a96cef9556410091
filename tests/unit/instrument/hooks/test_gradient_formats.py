"""What ranks of a script send: sparse gradients, half of the bytes, by a hook of its own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from instrumented import CLASSES, dataset, instrumented, loop, model, script_task
from nfold.core.variant import Variant
from nfold.instrument.hooks import runtime_hooks
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.runtime_hooks import EventCounter, is_sparse, tensor_bytes


class Words(nn.Module):
    """Adds up an embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.words(samples.long().abs() % 5).sum(1))
        return found


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("exchange", ["real", "none", "barrier"])
def test_sparse_gradients_and_comm_hook_are_recorded(exchange: Any) -> None:
    def training(hooked: bool) -> None:
        module = DistributedDataParallel(Words())
        if hooked:
            module.register_comm_hook(None, default_hooks.allreduce_hook)
        loop(
            DataLoader(dataset(), batch_size=8),
            module,
            torch.optim.SGD(module.parameters(), lr=0.1),
        )

    task = script_task(Variant(exchange=exchange))
    seen = instrumented(functools.partial(training, hooked=False), task).profile
    assert seen.sparse_gradient_bytes == 5 * 4 * 4
    if exchange == "real":
        assert seen.comm_hook == ""
        hooked = instrumented(functools.partial(training, hooked=True), task).profile
        assert hooked.comm_hook == "allreduce_hook"


@pytest.mark.usefixtures("group")
def test_fp16_hook_halves_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: set[torch.dtype] = set()
    usual = distributed_c10d.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **how: Any) -> Any:
        sent.add(tensor.dtype)
        return usual(tensor, *args, **how)

    monkeypatch.setattr(distributed_c10d, "all_reduce", all_reduce)

    def training() -> None:
        module = DistributedDataParallel(model())
        loop(DataLoader(dataset(), 8), module, torch.optim.SGD(module.parameters(), lr=0.1))

    seen = instrumented(training, script_task(Variant(gradient_compression="fp16"))).profile
    assert sent == {torch.float16}
    assert seen.parallel == "ddp"


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_bytes_of_sparse_tensors() -> None:
    dense = torch.eye(4)
    assert tensor_bytes(dense) == 64
    assert tensor_bytes(dense.to_sparse()) == 4 * 4 + 2 * 4 * 8
    assert [is_sparse(one) for one in (None, dense, dense.to_sparse(), dense.to_sparse_csr())] == [
        False,
        False,
        True,
        True,
    ]


def test_sparse_tensor_is_moved() -> None:
    """One of a graph's edges, in every step."""
    tally, patches = EventCounter(), Patches()
    runtime_hooks.install_tensor_hooks(patches, tally, lambda _: None)
    tally.enabled = True
    try:
        assert torch.eye(3).to_sparse().to(torch.float64).dtype is torch.float64
    finally:
        patches.undo()
    assert not tally.counts
    assert not list(tally.source_locations(1))
