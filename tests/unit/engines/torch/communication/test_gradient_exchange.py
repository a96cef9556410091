"""Gradient exchange on one rank: buckets, micro-batches, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from nfold.core.errors import UsageError
from nfold.engines.sampling import BatchShare
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.communication.gradient_exchange import (
    FIRST_BUCKET_BYTES,
    Bucket,
    ExchangeWait,
    GradientExchange,
    split_into_buckets,
)


def parameter(count: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(count, dtype=dtype))


def part(count: int, *, last: bool) -> BatchShare:
    return BatchShare(count=count, global_count=4, micro_batches=2, is_last=last)


def test_buckets_fill_from_the_last_parameter_and_begin_small() -> None:
    quarter = FIRST_BUCKET_BYTES // 16
    parameters = [parameter(quarter) for _ in range(12)]
    groups = split_into_buckets(parameters, 2 * FIRST_BUCKET_BYTES, FIRST_BUCKET_BYTES)
    assert [len(group) for group in groups] == [4, 8]
    assert [p for group in groups for p in group] == parameters[::-1]


def test_a_parameter_larger_than_a_bucket_has_one_of_its_own() -> None:
    parameters = [parameter(4), parameter(FIRST_BUCKET_BYTES), parameter(4)]
    assert [len(group) for group in split_into_buckets(parameters, 64, 64)] == [1, 1, 1]


def test_types_are_not_mixed() -> None:
    parameters = [parameter(4), parameter(4, torch.float64), parameter(4, torch.float64)]
    assert [len(group) for group in split_into_buckets(parameters, 1024, 1024)] == [2, 1]


def test_buckets_are_of_one_type_and_of_some_size() -> None:
    small = [parameter(4) for _ in range(3)]
    half, large = parameter(4, torch.float16), parameter(100)
    last_first = [*small, half, large][::-1]
    found = [[one.nbytes for one in bucket] for bucket in split_into_buckets(last_first, 40, 40)]
    assert found == [[16, 16], [16], [8], [400]]
    assert split_into_buckets([], 40, 40) == []


def test_parts_of_a_step_add_up_to_the_mean_over_the_batch() -> None:
    weight, current_share = parameter(1), CurrentShare(1)
    GradientExchange([[weight]], 1, current_share)
    current_share.set(part(3, last=False))
    torch.autograd.backward((weight * 2).sum())
    assert weight.grad is None
    current_share.set(part(1, last=True))
    torch.autograd.backward((weight * 10).sum())
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(2 * 3 / 4 + 10 / 4)


def test_the_next_step_begins_from_nothing() -> None:
    weight, current_share = parameter(1), CurrentShare(1)
    GradientExchange([[weight]], 1, current_share)
    for _ in range(2):
        for last in (False, True):
            current_share.set(part(2, last=last))
            torch.autograd.backward(weight.sum())
        assert weight.grad is not None
        assert weight.grad.item() == pytest.approx(1.0)
        weight.grad = None


def test_a_parameter_used_only_in_an_early_part_keeps_its_gradient() -> None:
    early, both, current_share = parameter(1), parameter(1), CurrentShare(1)
    GradientExchange([[early, both]], 1, current_share)
    current_share.set(part(2, last=False))
    torch.autograd.backward((early + both).sum())
    current_share.set(part(2, last=True))
    torch.autograd.backward(both.sum())
    assert early.grad is not None
    assert both.grad is not None
    assert (early.grad.item(), both.grad.item()) == pytest.approx((0.5, 1.0))


@pytest.mark.parametrize("first_part", [False, True])
def test_a_parameter_that_is_unfrozen_during_a_step_is_exchanged(*, first_part: bool) -> None:
    """Also if no other parameter gets a gradient."""
    early, late, current_share = parameter(1), parameter(1), CurrentShare(1)
    late.requires_grad_(False)
    exchange = GradientExchange([[late, early]], 1, current_share)
    current_share.set(part(1, last=False))
    if first_part:
        torch.autograd.backward((early + late).sum())
    late.requires_grad_()
    current_share.set(part(3, last=True))
    torch.autograd.backward((late * 2).sum())
    assert late.grad is not None
    assert late.grad.item() == pytest.approx(2 * 3 / 4)
    assert (early.grad is not None) == first_part
    assert [bucket.parameters for bucket in exchange.buckets] == [(early,), (late,)]


def test_the_host_does_not_wait_to_find_gradients_of_frozen_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks: list[bool] = []
    assign = Bucket.assign_gradients

    def note(bucket: Bucket, *, check_unused: bool) -> None:
        checks.append(check_unused)
        assign(bucket, check_unused=check_unused)

    monkeypatch.setattr(Bucket, "assign_gradients", note)
    one, other = parameter(1), parameter(1)
    GradientExchange([[one, other]], 1, CurrentShare(1))
    for frozen in (False, True):
        one.grad = other.grad = None
        other.requires_grad_(not frozen)
        torch.autograd.backward((one + other).sum())
        assert one.grad is not None
        assert (other.grad is None) == frozen
    torch.autograd.backward(one.sum())
    other.requires_grad_(True)
    torch.autograd.backward(one.sum())
    assert checks == [False, False, False, True]


def test_a_parameter_that_no_part_used_has_no_gradient() -> None:
    used, unused, current_share = parameter(1), parameter(1), CurrentShare(1)
    GradientExchange([[used, unused]], 1, current_share)
    for last in (False, True):
        current_share.set(part(2, last=last))
        torch.autograd.backward(used.sum())
    assert unused.grad is None


def test_a_second_backward_in_a_part_is_refused() -> None:
    weight, current_share = parameter(1), CurrentShare(1)
    GradientExchange([[weight]], 1, current_share)
    current_share.set(part(2, last=True))
    torch.autograd.backward(weight.sum())
    with pytest.raises(UsageError, match=r"zero_grad\(\) after optimizer\.step\(\)"):
        torch.autograd.backward(weight.sum())


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    GradientExchange([table.parameters()], 1, CurrentShare(1))
    with pytest.raises(UsageError, match="sparse=False"):
        torch.autograd.backward(table(torch.tensor([1])).sum())


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_is_refused() -> None:
    weight = parameter(1)
    GradientExchange([[weight]], 1, CurrentShare(1))
    with pytest.raises(UsageError, match="create_graph=True"):
        torch.autograd.backward(weight.square().sum(), create_graph=True)


def test_a_removed_exchange_does_not_change_gradients() -> None:
    weight, current_share = parameter(1), CurrentShare(1)
    exchange = GradientExchange([[weight]], 1, current_share)
    exchange.remove()
    current_share.set(part(2, last=False))
    torch.autograd.backward(weight.sum())
    assert weight.grad is not None


def test_a_gradient_keeps_its_parameter_s_order_of_axes() -> None:
    """Fused optimizers refuse a list of tensors that lie differently."""
    last = nn.Parameter(torch.ones(4, 3, 5, 5).to(memory_format=torch.channels_last))
    usual = nn.Parameter(torch.ones(2, 3))
    GradientExchange([[last, usual]], 1, CurrentShare(1))
    values = torch.arange(300.0).view(4, 3, 5, 5)
    ((last * values).sum() + usual.sum()).backward()  # type: ignore[no-untyped-call]
    assert last.grad is not None
    assert usual.grad is not None
    assert last.grad.stride() == last.stride()
    assert usual.grad.stride() == usual.stride()
    assert torch.equal(last.grad, values)


def test_after_a_backward_that_broke_off_the_next_one_is_whole() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    exchange = GradientExchange([[first, second]], 1, CurrentShare(1))

    def refuse(_: torch.Tensor) -> None:
        raise ValueError("broken")

    handle = first.register_hook(refuse)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="broken"):
        (first * second.square()).sum().backward()  # type: ignore[no-untyped-call]
    handle.remove()
    exchange.reset()
    first.grad = second.grad = None
    (first * second.square()).sum().backward()  # type: ignore[no-untyped-call]
    assert first.grad is not None
    assert second.grad is not None
    assert torch.equal(first.grad, torch.ones(2))
    assert torch.equal(second.grad, torch.full((2,), 2.0))


def test_a_bucket_that_comes_late_is_updated_too() -> None:
    """Weight decay and momentum: a parameter that is stepped twice, or never, would differ."""

    def trained(*, overlap: bool) -> list[float]:
        torch.manual_seed(0)
        first, last, current_share = nn.Linear(3, 4), nn.Linear(4, 2), CurrentShare(1)
        model = nn.Sequential(first, last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        exchange = GradientExchange([first.parameters(), last.parameters()], 1, current_share)
        if overlap:
            exchange.overlap_optimizer(optimizer)
        for _ in range(3):
            current_share.set(BatchShare(count=5, global_count=5, micro_batches=1, is_last=True))
            torch.autograd.backward(model(torch.ones(5, 3)).square().mean())
            assert (first.weight.grad is None) == overlap
            optimizer.step()
            assert first.weight.grad is not None
            assert last.weight.grad is not None
            optimizer.zero_grad()
        return [value for p in model.parameters() for value in p.flatten().tolist()]

    assert trained(overlap=True) == trained(overlap=False)


def test_a_late_bucket_wants_its_step() -> None:
    weights, current_share = [parameter(1), parameter(1)], CurrentShare(1)
    GradientExchange([[weight] for weight in weights], 1, current_share).overlap_optimizer(
        torch.optim.SGD(weights)
    )
    current_share.set(BatchShare(count=4, global_count=4, micro_batches=1, is_last=True))
    torch.autograd.backward((weights[0] * weights[1]).sum())
    with pytest.raises(UsageError, match="second backward"):
        torch.autograd.backward((weights[0] * weights[1]).sum())


def test_only_the_backward_of_a_tensor_is_measured() -> None:
    """``autograd.backward`` also takes an edge of the graph, which has no hooks."""
    weight = torch.ones(3, requires_grad=True)
    wait = ExchangeWait(enabled=True)
    with wait.measure(get_gradient_edge(weight)):
        torch.autograd.backward(get_gradient_edge(weight), torch.ones(3))
    assert wait.take_seconds() == 0
    with wait.measure(loss := weight.sum()):
        torch.autograd.backward(loss)
    assert (wait.take_seconds() or 0) > 0
