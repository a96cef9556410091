"""Batch norm over the global batch: which layers change, and what stays the same."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from nfold.core.errors import UsageError
from nfold.core.plan import Plan
from nfold.engines.sampling import BatchShare
from nfold.engines.torch import batch_norm
from nfold.engines.torch.batch import CurrentShare, loss_weighted_share
from nfold.engines.torch.batch_norm import SynchronizedMarker, synchronize_batch_norm

TWO = Plan(devices=2, batch_norm="synchronised")


class Own(nn.BatchNorm2d):
    """A layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def made() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.InstanceNorm2d(4))


@pytest.mark.parametrize(
    ("plan", "changed"),
    [(TWO, True), (TWO.edit(devices=1), False), (TWO.edit(batch_norm="device"), False)],
)
def test_layers_change_where_the_plan_requires_it_on_several_devices(
    plan: Plan, changed: bool
) -> None:
    module = made()
    names, norm = list(module.state_dict()), module[1]
    synchronize_batch_norm(module, plan, CurrentShare(2))
    assert isinstance(module[1], SynchronizedMarker) is changed
    assert module[1] is norm
    assert isinstance(norm, nn.BatchNorm2d)
    assert list(module.state_dict()) == names
    assert [type(module[at]) for at in (0, 2)] == [nn.Conv2d, nn.InstanceNorm2d]


def test_twice_is_once() -> None:
    module = made()
    synchronize_batch_norm(module, TWO, CurrentShare(2))
    once = type(module[1])
    synchronize_batch_norm(module, TWO, CurrentShare(2))
    assert type(module[1]) is once


def test_an_evaluation_is_that_of_the_plain_layer() -> None:
    """In eval mode no rank waits for another: there is no process group here."""
    module, plain, x = made(), made(), torch.randn(2, 3, 4, 4)
    plain.load_state_dict(module.state_dict())
    synchronize_batch_norm(module, TWO, CurrentShare(2))
    assert torch.equal(module.eval()(x), plain.eval()(x))


def test_a_copy_and_a_pickle_are_plain_again() -> None:
    module = made()
    synchronize_batch_norm(module, TWO, CurrentShare(2))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other[1]) is nn.BatchNorm2d
        assert all(map(torch.equal, other.state_dict().values(), module.state_dict().values()))


def test_a_forward_of_its_own_is_refused() -> None:
    with pytest.raises(UsageError, match=r"forward of 0 \(Own\); allowed are nn.BatchNorm1d"):
        synchronize_batch_norm(nn.Sequential(Own(3)), TWO, CurrentShare(2))


def test_a_loss_that_is_weighted_already_leaves_equal_weights() -> None:
    current_share = CurrentShare(4)
    for count, weight in ((5, 0.25), (1, 0.25), (0, 0.0)):
        current_share.set(loss_weighted_share(count, 4))
        assert current_share.share.weight == weight
        assert current_share.is_even(4)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_part_that_no_rank_has_a_sample_of_moves_no_statistics(
    monkeypatch: pytest.MonkeyPatch, momentum: float | None
) -> None:
    """A batch of fewer samples than parts: the sample that pads counts nothing."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(batch_norm, "ALL_GATHER", lambda every, own: every.copy_(own))
    current_share, module = CurrentShare(2), nn.Sequential(nn.BatchNorm2d(4, momentum=momentum))
    synchronize_batch_norm(module, TWO, current_share)
    current_share.set(BatchShare(count=0, global_count=1, micro_batches=2, is_last=True))
    before = copy.deepcopy(module.state_dict())
    assert module(torch.randn(1, 4, 2, 2)).isfinite().all()
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("plan", [TWO.edit(devices=1), TWO.edit(batch_norm="device")])
def test_one_value_a_channel_is_its_own_mean(plan: Plan) -> None:
    """A device's share of a last batch may be one sample: PyTorch's layers refuse it."""
    norm = nn.BatchNorm2d(3)
    nn.init.constant_(norm.weight, 2.0)
    nn.init.constant_(norm.bias, 0.5)
    x = torch.tensor([1.0, -0.25, 3.0]).view(1, 3, 1, 1).requires_grad_()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(x)
    synchronize_batch_norm(norm, plan, CurrentShare(2))
    found = norm(x)
    found.sum().backward()
    torch.testing.assert_close(found.flatten(), norm.bias, atol=1e-3, rtol=0)
    torch.testing.assert_close(x.grad, torch.zeros_like(x), atol=1e-4, rtol=0)
    torch.testing.assert_close(norm.bias.grad, torch.ones(3))
    torch.testing.assert_close(norm.running_var, torch.full((3,), 0.9))
    torch.testing.assert_close(norm.running_mean, 0.1 * x.detach().flatten())


def test_more_values_are_normalised_by_the_layer_itself() -> None:
    module, plain, x = made(), made(), torch.randn(1, 3, 4, 4)
    plain.load_state_dict(module.state_dict())
    synchronize_batch_norm(module, TWO.edit(devices=1), CurrentShare(1))
    assert torch.equal(module(x), plain(x))
    assert module.state_dict().keys() == plain.state_dict().keys()
    assert all(map(torch.equal, module.state_dict().values(), plain.state_dict().values()))
    assert type(pickle.loads(pickle.dumps(module))[1]) is nn.BatchNorm2d
