"""Which optimizer's steps are counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nfold.instrument.optimizer_steps import StepOptimizer


def optimizer(*sizes: int) -> torch.optim.Optimizer:
    """Of so many linear layers."""
    return of(*(nn.Linear(size, size) for size in sizes or (2,)))


def of(*modules: nn.Module) -> torch.optim.Optimizer:
    """Of all parameters of these."""
    return torch.optim.SGD(nn.ModuleList(modules).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("turns", "ends"),
    [
        ("AAAA", "1111"),
        # In turn: the last one, from the second round on.
        ("ABABAB", "100101"),
        # One that steps five times as often, before the other is known.
        ("AAABAAABAAAB", "111000010001"),
        # Many optimizers, each for one layer.
        ("ABCABCABC", "100001001"),
    ],
)
def test_rarest_optimizer_ends_a_step(turns: str, ends: str) -> None:
    optimizers = {name: optimizer() for name in turns}
    boundary = StepOptimizer()
    assert "".join(str(int(boundary.ends_step(optimizers[name]))) for name in turns) == ends


def test_choice_is_final_after_the_warm_up() -> None:
    often, rare = optimizer(2), optimizer(3)
    boundary = StepOptimizer()
    assert all(boundary.ends_step(often) for _ in range(3))
    boundary.end_warm_up()
    for _ in range(3):
        assert not boundary.ends_step(rare)
        assert boundary.ends_step(often)
    assert boundary.optimizers == [often]


@pytest.mark.parametrize("settles", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_recreated_optimizer_takes_over_the_role(size: int, *, settles: bool) -> None:
    boundary, found = StepOptimizer(), []
    for fold in range(4):
        one = optimizer(size if fold else 2)
        found += [boundary.ends_step(one) for _ in range(3)]
        if settles and not fold:
            boundary.end_warm_up()
    assert found == [True] * 12
    assert boundary.optimizers == [one]


def test_parameters_are_known_after_the_script_ended() -> None:
    layer, boundary = nn.Linear(2, 2), StepOptimizer()
    one = of(layer)
    boundary.ends_step(one)
    boundary.end_warm_up()
    assert len(boundary.parameters) == 2
    one.add_param_group({"params": [*nn.Linear(3, 3).parameters()]})
    assert len(boundary.parameters) == 4
    del one
    assert boundary.optimizers == []
    assert [id(p) for p in boundary.parameters] == [id(p) for p in layer.parameters()]


def test_two_recreated_optimizers_take_over_their_roles() -> None:
    boundary, found = StepOptimizer(), []
    for fold in range(3):
        generator, critic = optimizer(2), optimizer(3, 3)
        found += [(boundary.ends_step(generator), boundary.ends_step(critic)) for _ in range(3)]
        if not fold:
            boundary.end_warm_up()
        del generator, critic
    assert found == [(True, False), *[(False, True)] * 8]


@pytest.mark.parametrize("kept", ["the same parameters", "the same shapes"])
def test_equal_shapes_take_over_the_role(kept: str) -> None:
    layer = nn.Linear(2, 2)
    before, boundary = of(layer), StepOptimizer()
    boundary.ends_step(before)
    boundary.end_warm_up()
    after = of(layer, nn.Linear(3, 3)) if kept == "the same parameters" else optimizer(2)
    assert [boundary.ends_step(one) for one in (after, after, before, after)] == [True] * 4
    assert boundary.optimizers == [after]


def test_equal_optimizers_take_over_in_order() -> None:
    """Both discriminators of two are made anew, those before are kept."""
    kept, boundary, found = [], StepOptimizer(), []
    for fold in range(3):
        kept += [optimizer(), optimizer()]
        found += [tuple(map(boundary.ends_step, kept[-2:])) for _ in range(2)]
        if not fold:
            boundary.end_warm_up()
    assert found == [(True, False), *[(False, True)] * 5]


def test_other_optimizer_counts_when_the_chosen_stops() -> None:
    before, after, boundary = optimizer(2), optimizer(3), StepOptimizer()
    boundary.ends_step(before)
    boundary.end_warm_up()
    assert [boundary.ends_step(after) for _ in range(3)] == [False, True, True]
    assert boundary.optimizers == [after]
