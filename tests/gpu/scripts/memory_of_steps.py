"""Train with nfold.Run on GPUs of which the last is almost full: ``memory_of_steps.py CASES FOLDER``.

FOLDER/NAME-K.json gets what rank K ends with.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import nfold
from nfold.engines.torch.communication.data_parallel import measure_bucket_bytes
from nfold.engines.torch.run import user_run

MIB = 2**20
FREE_MIB = 1536  # on the last rank
ROW_MIB = 96  # of a sample, in forward or in backward
SAMPLES, BATCH, WIDTH = 256, 64, 512


class Spike(torch.autograd.Function):
    """Needs memory for each row in the forward, or in the backward, in which others are done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: str) -> Tensor:
        ctx.place = place
        if place == "forward":
            ctx.save_for_backward(x.new_empty(len(x) * ROW_MIB * MIB // 4))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        if ctx.place == "backward":
            gradient.new_empty(len(gradient) * ROW_MIB * MIB // 4)
        return gradient, None


class Net(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
        self.last = nn.Linear(WIDTH, 4)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        hidden = Spike.apply(torch.tanh(self.first(x)), self.place)  # type: ignore[no-untyped-call]
        result: Tensor = self.last(torch.tanh(self.layers(hidden)))
        return result


def main(case: dict[str, Any], out: Path) -> None:
    run = nfold.Run(device="cuda", **case.get("plan", {}))
    torch.manual_seed(3)
    model = Net(case["place"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    measure_bucket_bytes(run.device, run.world_size)  # NCCL's first collectives
    with mock.patch.object(user_run, "measure_bucket_bytes", return_value=MIB):
        run.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(5)
    data = torch.randn(SAMPLES, 16, generator=generator)
    labels = torch.randint(4, (SAMPLES,), generator=generator)
    loader = run.loader((data, labels), batch_size=BATCH)

    @run.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    filler = None
    torch.cuda.empty_cache()
    if case.get("full") and run.rank == run.world_size - 1:
        size = torch.cuda.mem_get_info()[0] - FREE_MIB * MIB
        filler = torch.empty(size, dtype=torch.uint8, device=run.device)
    before = torch.cuda.memory_stats()["num_ooms"]
    losses: list[float] = []
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for _ in range(6):
            for x, y in loader:
                losses.append(run.mean(train_step(x, y), count=len(y)))
    found = {
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "losses": losses,
        "steps": run.steps,
        "ooms": torch.cuda.memory_stats()["num_ooms"] - before,
        "printed": printed.getvalue(),
    }
    del filler
    out.with_name(f"{out.name}-{run.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for name, one in json.loads(Path(sys.argv[1]).read_text()).items():
        main(one, Path(sys.argv[2]) / name)
