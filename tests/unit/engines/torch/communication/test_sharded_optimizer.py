"""Which rank owns a parameter, what is sent together, and which optimizers are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import nfold
from nfold.core.errors import UsageError
from nfold.engines.torch.communication.sharded_optimizer import (
    ShardedOptimizer,
    assign_owners,
    divide_messages,
)


def parameter(count: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(count, dtype=dtype))


def test_ranks_own_about_the_same_number_of_bytes() -> None:
    assert assign_owners([5, 1, 3, 3], 2) == [0, 0, 1, 1]
    assert assign_owners([5, 1, 3, 3], 2, [100, 0]) == [1, 1, 1, 1]
    assert assign_owners([7], 3) == [0]


def test_messages_have_one_owner_and_type_and_a_limited_size() -> None:
    a, b, c, d, large = (
        *(parameter(4) for _ in range(3)),
        parameter(4, torch.float64),
        parameter(99),
    )
    owners = {a: 1, b: 0, c: 1, d: 1, large: 1}
    messages = divide_messages(owners, owners, 32)
    found = [(message.owner, len(message.parameters)) for message in messages]
    assert found == [(0, 1), (1, 2), (1, 1), (1, 1)]
    assert messages[1].parameters == [a, c]


def test_state_from_before_is_kept_by_the_owner_only() -> None:
    own, other = parameter(4), parameter(2)
    optimizer = torch.optim.Adam([own, other])
    for one in (own, other):
        one.grad = torch.ones_like(one)
    optimizer.step()
    sharded = ShardedOptimizer(optimizer, 0, 2)
    assert set(optimizer.state) == {own}
    assert set(sharded.state_dict()["state"]) == {0}
    with pytest.warns(UserWarning, match=r"this rank's parameters only.*run\.checkpoint"):
        optimizer.state_dict()


def test_parameters_that_are_added_later_have_an_owner() -> None:
    first, second = parameter(4), parameter(4)
    optimizer = torch.optim.SGD([first], lr=0.1)
    sharded = ShardedOptimizer(optimizer, 0, 2)
    optimizer.add_param_group({"params": [second]})
    optimizer.step()
    assert [sharded.owner(one) for one in (first, second)] == [0, 1]


def test_a_closure_is_refused() -> None:
    optimizer: Any = torch.optim.SGD([parameter(4)], lr=0.1)
    ShardedOptimizer(optimizer, 0, 2)
    optimizer.step(None)
    with pytest.raises(UsageError, match=r"closure.*optimizer\.step\(\) after backward"):
        optimizer.step(closure=float)
    with pytest.raises(UsageError, match="closure"):
        optimizer.step(float)


class OwnOptimizer(torch.optim.SGD): ...


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, OwnOptimizer])
def test_optimizers_that_may_not_update_each_parameter_alone_are_refused(
    kind: Any,
) -> None:
    run, model = nfold.Run(device="cpu", optimizer_state="sharded"), nn.Linear(2, 1)
    with pytest.raises(UsageError, match=rf'{kind.__name__}.*next: optimizer_state="whole"'):
        run.prepare(model, kind(model.parameters()))
