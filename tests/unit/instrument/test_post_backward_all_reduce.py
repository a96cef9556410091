"""Copies of a script that exchange their gradients before a step of the optimizer."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, loop, model, script_task, train_with_scaler
from nfold.core.interleave import schedule_slots
from nfold.core.variant import Variant
from nfold.engines.interleaver import ActiveVariant
from nfold.instrument import optimizer_steps
from nfold.instrument.rank_environment import RENDEZVOUS_VARIABLE

LATE = Variant(independent=True, exchange_after_backward=True)


@pytest.fixture
def _meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    own: Any = dist
    store = own.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv(RENDEZVOUS_VARIABLE, f"127.0.0.1:{store.port}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    gc.collect()


def _gradients(rank: int) -> list[torch.Tensor]:
    """Of one of two copies after two exchanges; the last parameter has one in copy 0 only."""
    task = dataclasses.replace(script_task(LATE, world_size=2), rank=rank)
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4)),
                  nn.Parameter(torch.zeros(2, dtype=torch.float64))]  # fmt: skip
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    exchange = optimizer_steps.PostBackwardAllReduce(task, ActiveVariant(task))
    for _ in range(2):
        for parameter in parameters[: 3 - rank]:
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        exchange.all_reduce(optimizer)
    return [p.grad for p in parameters if p.grad is not None]


@pytest.mark.usefixtures("_meeting")
def test_replicas_sum_their_gradients() -> None:
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(_gradients, (0, 1))
    assert [set(gradient.flatten().tolist()) for gradient in first] == [{3.0}, {3.0}, {1.0}]
    assert [set(gradient.flatten().tolist()) for gradient in second] == [{3.0}, {3.0}]


def _sparse(rank: int) -> torch.Tensor:
    """Of one of two copies, whose embedding has sparse gradients."""
    task = dataclasses.replace(script_task(LATE, world_size=2), rank=rank)
    words = nn.Embedding(4, 2, sparse=True)
    words(torch.tensor([rank])).sum().backward()
    optimizer_steps.PostBackwardAllReduce(task, ActiveVariant(task)).all_reduce(
        torch.optim.SGD(words.parameters(), lr=0.1)
    )
    assert words.weight.grad is not None
    return words.weight.grad


@pytest.mark.usefixtures("_meeting")
def test_sparse_gradients_are_sent_and_keep_their_values() -> None:
    with ThreadPoolExecutor(2) as both:
        found = [gradient.to_dense().sum(1).tolist() for gradient in both.map(_sparse, (0, 1))]
    assert found == [[2.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]]


class Counted:
    """Notes in which step gradients were exchanged."""

    def __init__(self) -> None:
        self.exchanged: list[int] = []
        self.steps = 0

    def stepped(self) -> None:
        self.steps += 1

    def __call__(self, _parameters: Any) -> None:
        self.exchanged.append(self.steps)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted()
    monkeypatch.setattr(optimizer_steps.PostBackwardAllReduce, "_all_reduce_bucket", found)
    return found


def test_post_backward_exchange_is_interleaved(counted: Counted) -> None:
    def training() -> None:
        module = model()
        module.register_forward_pre_hook(lambda *_: counted.stepped())
        loop(DataLoader(dataset(), batch_size=8), module, torch.optim.SGD(module.parameters(), 0.1))

    task = script_task(Variant(independent=True))
    task = dataclasses.replace(task, interleaved_variants=(Variant(independent=True), LATE))
    assert instrumented(training, task).samples is not None
    at = task.plan.warmup_steps
    for part in schedule_slots(task.interleaved_variants, task.plan):
        made = {step for step in counted.exchanged if at < step <= at + part.steps}
        if part.variant_index is not None:
            assert len(made) == (part.steps if part.variant_index else 0)
        at += part.steps
    assert min(counted.exchanged) > task.plan.warmup_steps


def test_scaler_step_is_exchanged_once(counted: Counted) -> None:
    found = instrumented(lambda: train_with_scaler(after_step=counted.stepped), script_task(LATE))
    assert found.samples is not None
    assert counted.exchanged == list(range(14))
