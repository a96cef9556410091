"""Transformers on GPUs: captured steps with flash attention, checkpointing and several lengths."""

from __future__ import annotations

import json
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import nfold
from integration.scripts.token_training import BATCH
from launched import launch
from nfold.engines.torch.step.cuda_graph import MAX_GRAPHS, WARM_UP_CALLS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
one_gpu = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
SCRIPT = Path(__file__).parents[1] / "integration" / "scripts" / "token_training.py"
STEPS, WIDTH, HEADS, LENGTH, VOCABULARY = 8, 64, 2, 48, 31


@pytest.fixture(autouse=True)
def _no_plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        )
        assert q.dtype == torch.bfloat16
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
            )
        result: Tensor = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Transformer(nn.Module):
    def __init__(self, *, dropout: float, checkpointed: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            call = partial(checkpoint, block, use_reentrant=False) if self.checkpointed else block
            hidden = call(hidden)
        logits: Tensor = self.head(hidden)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(
    step: str,
    *,
    seed: int = 0,
    lr: float = 1e-2,
    lengths: tuple[int, ...] = (LENGTH,) * STEPS,
    **model_options: Any,
) -> tuple[list[float], int]:
    """The losses of a step per length, and the number of graphs."""
    run = nfold.Run(device="cuda", precision="bf16", step=step)
    torch.manual_seed(0)
    model = Transformer(**model_options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer = run.prepare(model, optimizer)
    text = torch.randint(VOCABULARY, (8, max(lengths)), device=run.device)
    texts = [text[:, :n].contiguous() for n in lengths]
    torch.manual_seed(seed)  # of dropout

    @run.step
    def train_step(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    losses = [float(train_step(ids)) for ids in texts]
    captured = getattr(train_step, "_captured", None)
    return losses, captured.graphs if captured else 0


@one_gpu
@pytest.mark.parametrize("checkpointed", [False, True])
def test_flash_attention_is_captured_with_the_losses_of_eager(checkpointed: bool) -> None:
    """``checkpoint`` with its default, which saves the state of the random generator."""
    options: dict[str, Any] = {"dropout": 0.0, "checkpointed": checkpointed}
    eager, _ = train("eager", **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs eagerly")
        captured, graphs = train("captured", **options)
    assert graphs == 1
    assert eager[-1] < 0.9 * eager[0]
    assert captured == pytest.approx(eager, rel=2e-2)


@one_gpu
def test_dropout_draws_in_replays_what_it_draws_in_eager_steps() -> None:
    options: dict[str, Any] = {"dropout": 0.5, "checkpointed": False}
    eager, other = (train("eager", seed=seed, **options)[0] for seed in (0, 1))
    captured, graphs = train("captured", **options)
    assert graphs == 1
    noise = max(abs(a - b) for a, b in zip(eager, other, strict=True))
    assert max(abs(a - b) for a, b in zip(eager, captured, strict=True)) < 0.5 * noise


@one_gpu
def test_checkpointing_with_dropout_runs_eagerly_and_is_reported() -> None:
    options: dict[str, Any] = {"dropout": 0.5, "checkpointed": True}
    eager, _ = train("eager", **options)
    with pytest.warns(UserWarning, match="runs eagerly: .*checkpointing with random numbers"):
        losses, graphs = train("captured", **options)
    assert graphs == 0
    assert losses == pytest.approx(eager, rel=2e-2)


@one_gpu
def test_sixteen_lengths_are_captured_and_the_others_run_eagerly() -> None:
    lengths = tuple(length for length in range(8, 28) for _ in range(WARM_UP_CALLS + 2))
    options: dict[str, Any] = {
        "dropout": 0.0,
        "checkpointed": False,
        "lengths": lengths,
        "lr": 5e-4,
    }
    eager, _ = train("eager", **options)
    with pytest.warns(UserWarning, match="CUDA graphs hold") as caught:
        captured, graphs = train("captured", **options)
    assert graphs == MAX_GRAPHS == 16
    (message,) = [str(w.message) for w in caught if "CUDA graphs hold" in str(w.message)]
    held = re.match(r"step train_step: 16 CUDA graphs hold (\S+) GiB; 1 other sets", message)
    assert held is not None
    assert 0 < float(held[1]) < 1
    assert captured == pytest.approx(eager, rel=1e-2)


@pytest.mark.integration
@pytest.mark.parametrize("world", [1, 2])
def test_lengths_that_differ_between_ranks_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    """Ranks then record at different steps: one runs eagerly while another replays."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    cases: dict[str, Any] = {
        step: {
            "plan": {"device": "cuda", "step": step},
            "pad_to": pad_to,
            "per_token": True,
            "epochs": 8,
        }
        for step, pad_to in (("eager", 1), ("captured", 4))
    }
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    launch(SCRIPT, world, str(tmp_path / "cases.json"), str(tmp_path))
    for rank in range(world):
        eager, captured = (
            json.loads((tmp_path / f"{step}-{rank}.json").read_text()) for step in cases
        )
        expected = torch.tensor(eager["parameters"])
        assert torch.allclose(torch.tensor(captured["parameters"]), expected, atol=1e-3)
        assert eager["steps"] == captured["steps"] == 8 * -(-22 // BATCH)
        assert 1 <= captured["graphs"] <= 6
