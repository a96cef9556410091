"""Outputs of a prepared model, eager and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nfold.core.plan import Plan
from nfold.engines.torch.run import prepared_module
from nfold.engines.torch.run.deferred_cast import DeferredCast, defer_cast
from nfold.engines.torch.run.plan_switch import EagerReference
from nfold.engines.torch.run.prepared_module import prepare_module, prepared_forward

CPU = torch.device("cpu")


def plan(**fields: Any) -> Plan:
    return Plan(precision="fp32", layout="channels_first", step="eager").edit(**fields)


class Language(nn.Module):
    """Returns its loss and its logits, as models of texts do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layer = nn.Linear(8, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.dropout(self.layer(self.norm(x)))
        return {"loss": functional.cross_entropy(logits, y), "logits": logits}


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 8), torch.randint(4, (16,))


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_module, "DEFERRED_NUMBERS", 1)


def test_what_a_model_returns_beside_its_loss_is_cast_when_it_is_read(
    batch: tuple[Tensor, Tensor],
) -> None:
    model = prepare_module(Language(), plan(precision="bf16"), CPU)
    outputs = model(*batch)
    assert isinstance(outputs["logits"], DeferredCast)
    assert outputs["logits"].shape == (16, 4)
    assert outputs["logits"].whole is None
    assert outputs["logits"].dtype == torch.float32
    assert outputs["logits"].argmax(1).shape == (16,)
    assert type(outputs["loss"]) is Tensor


def test_the_only_output_of_a_model_is_cast_at_once() -> None:
    model = prepare_module(nn.Linear(8, 4), plan(precision="bf16"), CPU)
    output = model(torch.randn(2, 8))
    assert type(output) is Tensor
    assert output.dtype == torch.float32


def test_gradients_pass_through_a_deferred_cast_that_was_first_read_without_them() -> None:
    weight = torch.ones(3, requires_grad=True)
    deferred = defer_cast(weight.bfloat16() * 2)
    with torch.no_grad():
        assert deferred.max().item() == 2
    deferred.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 2]


def test_operations_on_a_deferred_cast_give_plain_fp32_tensors() -> None:
    deferred = defer_cast(torch.tensor([1.0, 2.0]).bfloat16())
    results = [
        deferred.detach(),
        deferred[0],
        torch.cat([deferred, deferred]),
        functional.softmax(deferred, 0),
        copy.deepcopy(deferred),
        deferred + deferred,
    ]
    assert {type(result) for result in results} == {Tensor}
    assert {result.dtype for result in results} == {torch.float32}
    assert deferred.tolist() == [1.0, 2.0]


Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def compiled_as(monkeypatch: pytest.MonkeyPatch, change: Compile) -> None:
    monkeypatch.setattr(torch, "compile", change)


def raising(_: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no such operation\nand more")

    return compiled


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(*args: Any) -> Any:
        return {name: 2 * out for name, out in function(*args).items()}

    return compiled


def test_a_model_that_cannot_be_compiled_runs_eagerly_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, batch: tuple[Tensor, Tensor]
) -> None:
    compiled_as(monkeypatch, raising)
    model = prepare_module(Language(), plan(step="compiled"), CPU)
    with pytest.warns(UserWarning, match="Language runs eagerly: .*no such operation"):
        first = model(*batch)
    assert torch.equal(model(*batch)["loss"], first["loss"])


def test_compiled_outputs_that_differ_are_not_used(
    monkeypatch: pytest.MonkeyPatch, batch: tuple[Tensor, Tensor]
) -> None:
    compiled_as(monkeypatch, doubled)
    model = prepare_module(Language(), plan(), CPU)
    expected = model(*batch)["loss"]
    forward = prepared_forward(model)
    forward.reference = EagerReference
    forward.select_step("compiled")
    assert torch.equal(model(*batch)["loss"], expected)
    assert "differ from eager ones by 1" in str(forward.failure)
    forward.select_step("compiled")
    assert forward.step == "eager"


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_comparison_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, batch: tuple[Tensor, Tensor], dropout: float
) -> None:
    compiled_as(monkeypatch, lambda function: function)
    torch.manual_seed(0)
    model = Language(dropout)
    untouched = prepare_module(copy.deepcopy(model), plan(), CPU)
    compared = prepare_module(model, plan(), CPU)
    forward = prepared_forward(compared)
    forward.reference = EagerReference
    forward.select_step("compiled")
    torch.manual_seed(7)
    expected = untouched(*batch)["loss"]
    torch.manual_seed(7)
    assert torch.equal(compared(*batch)["loss"], expected)
    assert forward.failure is None
    for own, other in zip(compared.buffers(), untouched.buffers(), strict=True):
        assert torch.equal(own, other)


def test_an_error_of_the_model_itself_is_raised(batch: tuple[Tensor, Tensor]) -> None:
    model = prepare_module(Language(), plan(step="compiled"), CPU)
    with pytest.warns(UserWarning, match="runs eagerly"), pytest.raises(RuntimeError):
        model(batch[0][:, :3], batch[1])


def test_evaluation_is_eager_unless_compilation_was_requested(
    monkeypatch: pytest.MonkeyPatch, batch: tuple[Tensor, Tensor]
) -> None:
    compiled_as(monkeypatch, doubled)
    requested = prepare_module(Language(), plan(step="compiled"), CPU).eval()
    chosen = prepare_module(Language(), plan(), CPU).eval()
    chosen.load_state_dict(requested.state_dict())
    prepared_forward(chosen).select_step("compiled")
    with torch.no_grad():
        assert torch.equal(requested(*batch)["loss"], 2 * chosen(*batch)["loss"])
