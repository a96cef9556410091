"""Activation checkpointing of a script: seen in the warm-up, and left out as a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils.data import DataLoader

from instrumented import FEATURES, dataset, instrumented, script_task
from nfold.core.errors import Unsupported
from nfold.core.variant import Variant

KEPT = Variant(activation_checkpointing=False)
STEPS = 24


def train(forward: Callable[[nn.Module, Tensor], Tensor]) -> tuple[list[Tensor], int]:
    """Return the trained parameters, and how often the hidden layers computed a forward."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 4))
    computed: list[int] = []
    layers[0].register_forward_hook(lambda *_: computed.append(1))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for samples, labels in [*DataLoader(dataset(), batch_size=8)] * 3:
        optimizer.zero_grad()
        samples.requires_grad_()
        nn.functional.cross_entropy(forward(layers, samples), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [*layers.parameters()], len(computed)


def usual(layers: nn.Module, samples: Tensor) -> Tensor:
    scores: Tensor = layers(samples)
    return scores


def without_reentry(layers: nn.Module, samples: Tensor) -> Tensor:
    return checkpoint.checkpoint(layers, samples, use_reentrant=False, preserve_rng_state=True)  # type: ignore[no-any-return]


def with_reentry(layers: nn.Module, samples: Tensor) -> Tensor:
    return checkpoint.checkpoint(layers, samples, use_reentrant=True)  # type: ignore[no-any-return]


def in_segments(layers: Any, samples: Tensor) -> Tensor:
    return checkpoint.checkpoint_sequential(layers, 2, samples, use_reentrant=False)  # type: ignore[no-any-return,no-untyped-call]


def under(variant: Variant, forward: Callable[[nn.Module, Tensor], Tensor]) -> Any:
    """Return what ``train`` returns, and whether the remedy is useful."""
    found: list[Any] = []
    task = script_task(variant, steps=100, warmup_steps=4)
    seen = instrumented(lambda: found.append(train(forward)), task)
    return *found[0], Variant.activation_checkpointing.is_useful(seen.profile)


@pytest.mark.parametrize("forward", [without_reentry, with_reentry, in_segments])
def test_activations_are_kept_and_the_training_is_the_same(
    forward: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    assert under(Variant(), usual)[1:] == (STEPS, False)
    expected, computed, useful = under(Variant(), forward)
    assert (computed, useful) == (2 * STEPS, True)
    parameters, computed, _ = under(KEPT, forward)
    assert computed == STEPS
    assert all(torch.equal(one, other) for one, other in zip(expected, parameters, strict=True))


def test_a_script_without_checkpointing_is_refused() -> None:
    with pytest.raises(Unsupported, match="calls no checkpoint"):
        under(KEPT, usual)
