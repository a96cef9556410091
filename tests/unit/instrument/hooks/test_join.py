"""Ranks with unequal numbers of batches, which PyTorch's Join has wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, model, script_task
from nfold.core.errors import Unsupported
from nfold.core.variant import Variant

PASSES: list[int] = []
pytestmark = pytest.mark.usefixtures("group")


def _training(batches: Callable[[], Iterable[Any]]) -> Callable[[], None]:
    def training() -> None:
        PASSES.clear()
        module = DistributedDataParallel(model())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        while True:
            PASSES.append(0)
            with Join([module]):
                for samples, labels in batches():
                    optimizer.zero_grad()
                    loss = torch.nn.functional.cross_entropy(module(samples), labels)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()

    return training


@pytest.mark.parametrize("exchange", ["real", "none", "barrier"])
def test_passes_do_not_end_under_join(exchange: Any) -> None:
    """In the end of one, a rank would wait for those that nfold has stopped."""
    loader = DataLoader(dataset(48), batch_size=8)
    found = instrumented(_training(lambda: loader), script_task(Variant(exchange=exchange)))
    assert found.profile.uses_join
    assert found.samples is not None
    assert len(found.samples.step_ms) == 10
    assert PASSES == [0]


def test_join_without_a_loader_is_refused() -> None:
    batch = next(iter(DataLoader(dataset(), batch_size=8)))
    with pytest.raises(Unsupported, match="Join: ranks may make unequal numbers of steps"):
        instrumented(_training(lambda: [batch] * 9), script_task())
