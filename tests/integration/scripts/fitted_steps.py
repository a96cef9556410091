"""Train with memory "fit" and a model that runs out of memory: ``fitted_steps.py CASES.json FOLDER``.

FOLDER/NAME-K.json gets what rank K ends with.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import nfold
from integration.scripts.own_model import Net, made
from nfold.engines.torch.run import fitted_step, user_run


class Memory:
    """Runs out on some ranks with more than ``rows`` samples, in some steps."""

    def __init__(self, case: dict[str, Any], run: nfold.Run) -> None:
        self._case, self._run = case, run
        self.failures = 0

    def check(self, place: str, rows: int) -> None:
        case, run = self._case, self._run
        on_rank = case.get("rank") in (None, run.rank - run.world_size)
        if (
            place == case.get("place", "forward")
            and on_rank
            and rows > case["rows"]
            and case.get("first", 0) <= run.steps < case.get("last", 10**6)
        ):
            self.failures += 1
            raise torch.OutOfMemoryError("out of memory")

    def check_in_backward(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(  # type: ignore[no-untyped-call]
                lambda _: self.check("backward", len(tensor))
            )
        return tensor


def main(case: dict[str, Any], out: str) -> None:
    run = nfold.Run(device="cpu", memory="fit", **case.get("plan", {}))
    torch.manual_seed(3)
    net = Net()
    memory = Memory(case, run)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    models = [net.first, net.second, net.aside] if case.get("several_models") else [net]
    with mock.patch.object(user_run, "measure_bucket_bytes", return_value=100):
        run.prepare(*models, optimizer, schedule)
    loader = run.loader(made(), batch_size=case.get("batch", 10), shuffle=True)

    @run.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        memory.check("forward", len(x))
        hidden = memory.check_in_backward(torch.relu(net.first(x)))
        loss = nn.functional.cross_entropy(net.second(hidden), y)
        loss.backward()  # type: ignore[no-untyped-call]
        memory.check("clip", len(x))
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        return loss.detach()

    @run.step
    def evaluate(x: Tensor) -> Tensor:
        memory.check("evaluation", len(x))
        with torch.no_grad():
            return net.first(x)  # type: ignore[no-any-return]

    seen: list[list[float]] = []
    means: list[float] = []
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for _ in range(case.get("epochs", 5)):
            for x, y in loader:
                seen.append(x[:, 0].tolist())
                if case.get("place") == "evaluation":
                    assert len(evaluate(x)) == len(x)
                means.append(run.mean(train_step(x, y), count=len(y)))
    found = {
        "parameters": torch.cat([p.detach().flatten() for p in net.parameters()]).tolist(),
        "seen": seen,
        "means": means,
        "steps": run.steps,
        "failures": memory.failures,
        "printed": printed.getvalue(),
    }
    Path(f"{out}-{run.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for name, one in json.loads(Path(sys.argv[1]).read_text()).items():
        out = str(Path(sys.argv[2]) / name)
        try:
            with mock.patch.object(fitted_step, "FACTORS", one.get("factors", fitted_step.FACTORS)):
                main(one, out)
        except Exception as error:
            Path(f"{out}-{os.environ.get('RANK', '0')}.json").write_text(
                json.dumps({"error": f"{type(error).__name__}: {error}"})
            )
            if one.get("ends"):
                sys.stdout.flush()
                os._exit(0)
