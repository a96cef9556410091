"""Texts of different lengths on 1, 2 and 3 CPU devices: padding, accumulation, checkpointing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from integration.scripts.token_training import BATCH, Transformer, loss_of, texts
from launched import launch
from nfold.engines.sampling import BatchDivision

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow("token training", parts=6),
    pytest.mark.timeout(240),
]

SCRIPT = Path(__file__).parent / "scripts" / "token_training.py"
WORLDS = (1, 2, 3)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"pad_to": 8},
    "accumulated": {"plan": {"accumulate": 4}},
    "checkpointed": {"plan": {"accumulate": 2}, "checkpointed": True, "pad_to": 8},
    "per_token": {"per_token": True},
    "per_token_in_parts": {"per_token": True, "plan": {"accumulate": 4}, "pad_to": 8},
    "per_token_checkpointed": {"per_token": True, "checkpointed": True},
}
Found = dict[tuple[str, int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every rank of every case ended with, by (case, world)."""
    results: Found = {}
    for world in WORLDS:
        folder = tmp_path_factory.mktemp("runs")
        (folder / "cases.json").write_text(json.dumps(CASES))
        launch(SCRIPT, world, str(folder / "cases.json"), str(folder))
        for case in CASES:
            files = [folder / f"{case}-{rank}.json" for rank in range(world)]
            results[case, world] = [json.loads(file.read_text()) for file in files]
    return results


def reference(world: int, accumulate: int, *, per_token: bool) -> Tensor:
    """The parameters after training in which each micro-batch's loss has its samples as weight."""
    torch.manual_seed(3)
    model, samples = Transformer(), texts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    divisions = [
        BatchDivision(batch=BATCH, rank=rank, ranks=world, micro_batches=accumulate)
        for rank in range(world)
    ]
    for step in zip(
        *(division.global_batches(len(samples)) for division in divisions), strict=True
    ):
        optimizer.zero_grad()
        for division, positions in zip(divisions, step, strict=True):
            for part in division.split(positions):
                own = [torch.tensor(samples[place]["input_ids"]) for place in part.positions]
                batch = {
                    "input_ids": pad_sequence(own, batch_first=True),
                    "labels": pad_sequence(own, batch_first=True, padding_value=-100),
                }
                loss = loss_of(model, batch, per_token=per_token) * part.share.weight
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_losses_of_micro_batches_are_weighted_by_samples(
    found: Found, case: str, world: int
) -> None:
    """By samples, not by tokens; the padding changes nothing."""
    per_token = bool(CASES[case].get("per_token"))
    accumulate = CASES[case].get("plan", {}).get("accumulate", 1)
    expected = reference(world, accumulate, per_token=per_token)
    for rank in found[case, world]:
        assert torch.allclose(torch.tensor(rank["parameters"]), expected, atol=1e-6)


def test_tokens_of_equal_weight_train_alike_in_any_division(found: Found) -> None:
    """A sum over tokens, divided by samples times a constant; the mean of each part differs."""
    one_device = torch.tensor(found["per_token", 1][0]["parameters"])
    means = torch.tensor(found["plain", 1][0]["parameters"])
    for world in WORLDS:
        for case in ("per_token", "per_token_in_parts", "per_token_checkpointed"):
            for rank in found[case, world]:
                assert torch.allclose(torch.tensor(rank["parameters"]), one_device, atol=1e-6)
        if world > 1:
            parts = torch.tensor(found["plain", world][0]["parameters"])
            assert not torch.allclose(parts, means, atol=1e-4)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_a_step_has_one_exchange(found: Found, case: str, world: int) -> None:
    """The gradients are one bucket."""
    for rank in found[case, world]:
        assert rank["steps"] == 3
        assert rank["all_reduces"] == (3 if world > 1 else 0)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_of_a_step_may_have_different_lengths(found: Found, world: int) -> None:
    lengths = [rank["lengths"] for rank in found["plain", world]]
    assert any(len(set(step)) > 1 for step in zip(*lengths, strict=True))
    padded = [length for rank in found["padded", world] for length in rank["lengths"]]
    assert set(padded) == {8, 16}


@pytest.mark.parametrize("world", WORLDS)
def test_rates_are_known_without_an_exchange(found: Found, world: int) -> None:
    for rank in found["plain", world]:
        assert rank["rates"] == ["samples_per_s", "tokens_per_s"]
