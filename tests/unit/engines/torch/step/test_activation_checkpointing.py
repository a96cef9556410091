"""Checkpointed parts of a step that is recorded as a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import checkpoint

from nfold.core.errors import UsageError
from nfold.engines.torch.step.activation_checkpointing import RandomDraws, checkpoints_recorded


def test_no_state_is_read_while_a_step_without_random_numbers_is_recorded() -> None:
    usual = checkpoint.get_device_states
    with checkpoints_recorded(draws_random_numbers=False):
        assert checkpoint.get_device_states(torch.ones(1)) == ([], [])
    assert checkpoint.get_device_states is usual


def test_random_numbers_are_refused_and_the_function_is_restored() -> None:
    usual = checkpoint.get_device_states
    with (
        pytest.raises(UsageError, match=r"checkpointing with random numbers.*next: dropout 0"),
        checkpoints_recorded(draws_random_numbers=True),
    ):
        checkpoint.get_device_states(torch.ones(1))
    assert checkpoint.get_device_states is usual


def test_checkpoint_calls_the_function_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device module that is initialised, as that of GPUs is."""
    monkeypatch.setattr(checkpoint.DefaultDeviceType, "get_device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    x = torch.ones(2, requires_grad=True)

    def checkpointed() -> Any:
        return checkpoint.checkpoint(torch.exp, x, use_reentrant=False)

    with checkpoints_recorded(draws_random_numbers=False):
        checkpointed().sum().backward()
    assert torch.allclose(x.grad, torch.exp(x))  # type: ignore[arg-type]
    with pytest.raises(UsageError), checkpoints_recorded(draws_random_numbers=True):
        checkpointed()


def test_draws_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _device: torch.get_rng_state())
    draws = RandomDraws(torch.device("cuda"))
    with draws.observe():
        torch.ones(3)
    assert not draws.found
    for draw in (torch.rand, torch.ones):
        with draws.observe():
            draw(1)
        assert draws.found
