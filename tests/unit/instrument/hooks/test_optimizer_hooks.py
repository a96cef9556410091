"""Fused optimizers, and gradients that are deleted instead of zeroed, in a script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader

from instrumented import FEATURES, dataset, instrumented, script_task
from nfold.core.errors import Unsupported
from nfold.core.script_profile import ScriptProfile, SourceLocation
from nfold.core.source_edit import SetKeywords
from nfold.core.variant import Variant

FUSED = Variant(fused_optimizer=True)
DELETED = Variant(set_grads_to_none=True)
MakeOptimizer = Callable[[Any], Optimizer]


def train(
    make_optimizer: MakeOptimizer, *, zero: dict[str, Any] | None = None, unused: bool = False
) -> tuple[list[Tensor], Optimizer]:
    """Train 24 steps with ``zero_grad(**zero)``; return the parameters and the optimizer."""
    torch.manual_seed(0)
    module, spare = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 4)
    optimizer = make_optimizer([*module.parameters(), *(spare.parameters() if unused else ())])
    for samples, labels in [*DataLoader(dataset(), batch_size=8)] * 3:
        optimizer.zero_grad(**(zero or {}))
        loss = nn.functional.cross_entropy(module(samples), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [*module.parameters()], optimizer


def under(variant: Variant, training: Callable[[], Any]) -> tuple[Any, ScriptProfile]:
    """Return what the training returns when it ends by itself, and its profile."""
    returned: list[Any] = []
    observer = instrumented(
        lambda: returned.append(training()), script_task(variant, steps=100, warmup_steps=4)
    )
    return returned[0], observer.profile


@pytest.mark.parametrize("cls", [Adam, AdamW, SGD, Adagrad])
def test_an_optimizer_is_fused_and_trains_as_before(cls: Any) -> None:
    (plain, before), profile = under(Variant(), lambda: train(lambda p: cls(p, lr=0.01)))
    (fused, after), _ = under(FUSED, lambda: train(lambda p: cls(p, lr=0.01)))
    assert (before.defaults["fused"], after.defaults["fused"]) == (None, True)
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(one, other)
    assert Variant.fused_optimizer.is_useful(profile)
    assert Adam.__init__.__module__ == "torch.optim.adam"


@pytest.mark.parametrize(
    ("make_optimizer", "expected"),
    [
        (lambda p: Adam(p, foreach=True), "passes foreach=True to Adam"),
        (lambda p: AdamW(p, capturable=True), "passes capturable=True to AdamW"),
        (lambda p: SGD(p, lr=0.1, fused=False), "passes fused=False to SGD"),
        (lambda p: Adagrad(p, 0.1, 0, 0, 0, 1e-10, False), "passes foreach=False to Adagrad"),
        (lambda p: RMSprop(p), "constructs none of Adam"),
    ],
)
def test_a_script_that_chose_an_implementation_is_refused(
    make_optimizer: MakeOptimizer, expected: str
) -> None:
    with pytest.raises(Unsupported, match=expected):
        under(FUSED, lambda: train(make_optimizer))


@pytest.mark.parametrize("chosen", [{"foreach": True}, {"fused": False}, {"fused": True}])
def test_a_profile_tells_that_the_script_chose_an_implementation(chosen: dict[str, Any]) -> None:
    _, profile = under(Variant(), lambda: train(lambda p: AdamW(p, **chosen)))
    assert profile.chosen_optimizers == ("AdamW",)
    assert not Variant.fused_optimizer.is_useful(profile)


def test_the_lines_that_make_optimizers_are_in_the_profile() -> None:
    _, profile = under(Variant(), lambda: train(lambda p: SGD(p, lr=0.1)))
    location = profile.most_frequent_line("optimizer")
    assert location is not None
    name, _, line = location.partition(":")
    assert name.endswith(Path(__file__).name)
    assert "SGD(p, lr=0.1)" in Path(__file__).read_text().splitlines()[int(line) - 1]
    expected = SetKeywords(location=location, function="SGD", keywords=(("fused", "True"),))
    assert Variant.fused_optimizer.source_edits(True, profile) == (expected,)


def test_an_optimizer_of_a_package_is_not_edited() -> None:
    place = SourceLocation(line="train.py:9", package_line="transformers/trainer.py:1100")
    profile = ScriptProfile(optimizers=("AdamW",), source_locations={"optimizer": (place,)})
    assert Variant.fused_optimizer.source_edits(True, profile) is None
    assert not Variant.fused_optimizer.is_useful(ScriptProfile(optimizers=("RMSprop",)))


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("variant", "zero", "deleted"),
    [
        (Variant(), {"set_to_none": False}, False),
        (DELETED, {"set_to_none": False}, True),
        (Variant(), {}, True),
    ],
)
def test_gradients_are_deleted_and_the_training_is_the_same(
    variant: Variant, zero: dict[str, Any], *, deleted: bool
) -> None:
    expected, _ = under(Variant(), lambda: train(sgd))[0]

    def training() -> list[Tensor]:
        parameters, optimizer = train(sgd, zero=zero)
        optimizer.zero_grad(**zero)
        return parameters

    found, profile = under(variant, training)
    assert [p.grad is None for p in found] == [deleted, deleted]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert Variant.set_grads_to_none.is_useful(profile) == bool(zero)
    edits = Variant.set_grads_to_none.source_edits(True, profile) or ()
    assert [edit.keywords for edit in edits if isinstance(edit, SetKeywords)] == [
        (("set_to_none", "True"),)
    ] * bool(zero)


def test_parameters_without_a_gradient_are_a_refusal() -> None:
    with pytest.raises(Unsupported, match="2 of 4 parameters have no gradient"):
        under(DELETED, lambda: train(sgd, zero={"set_to_none": False}, unused=True))


def test_a_script_that_zeroes_no_gradients_is_refused() -> None:
    with pytest.raises(Unsupported, match="never passes set_to_none=False"):
        under(DELETED, lambda: train(sgd))
