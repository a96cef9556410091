"""Train a small transformer on texts of different lengths: ``token_training.py CASES.json FOLDER``.

CASES.json maps names to what is special in each case; FOLDER/NAME-K.json gets what rank K ends
with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, SAMPLES, BATCH, MAX_LENGTH = 11, 8, 22, 8, 12
all_reduces = 0


class Transformer(nn.Module):
    """One causal block; ``checkpointed`` computes it again in backward."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(ids)
        block: Callable[[Tensor], Tensor] = self.block
        if self.checkpointed:
            block = partial(checkpoint, self.block, use_reentrant=False)
        result: Tensor = self.out(block(hidden))
        return result

    def block(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(hidden).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return functional.gelu(hidden + mixed)


def texts() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, MAX_LENGTH + 1, (SAMPLES,), generator=generator).tolist()
    ids = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": one, "labels": one} for one in ids]


def loss_of(model: nn.Module, batch: dict[str, Tensor], *, per_token: bool) -> Tensor:
    """The mean over the tokens of a batch; ``per_token``: every token of a step has equal weight."""
    logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
    flat = logits.flatten(0, 1), labels.flatten()
    if not per_token:
        return functional.cross_entropy(*flat)
    return functional.cross_entropy(*flat, reduction="sum") / (len(labels) * MAX_LENGTH)


def main(case: dict[str, Any], out: str) -> None:
    run = nfold.Run(**{"device": "cpu", **case.get("plan", {})})
    torch.manual_seed(3)
    model = Transformer(checkpointed=bool(case.get("checkpointed")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(texts(), BATCH, shuffle=False, pad_to=case.get("pad_to", 1))

    @run.step
    def train_step(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        loss_of(model, batch, per_token=bool(case.get("per_token"))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    before, lengths = all_reduces, []
    for _ in range(case.get("epochs", 1)):
        for batch in loader:
            lengths.append(batch["input_ids"].shape[1])
            train_step(batch)
    captured = getattr(train_step, "_captured", None)
    found = {
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "all_reduces": all_reduces - before,
        "steps": run.steps,
        "lengths": lengths,
        "graphs": captured.graphs if captured else 0,
        "rates": sorted(run.rate()),
    }
    Path(f"{out}-{run.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    import torch.distributed as dist

    usual = dist.all_reduce

    def counted(*arguments: Any, **options: Any) -> Any:
        global all_reduces
        all_reduces += 1
        return usual(*arguments, **options)

    dist.all_reduce = counted  # before nfold reads it

    import nfold

    for name, one in json.loads(Path(sys.argv[1]).read_text()).items():
        main(one, str(Path(sys.argv[2]) / name))
