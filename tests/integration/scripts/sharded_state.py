"""Train with sharded or whole optimizer state: ``sharded_state.py CASES.json FOLDER [LOAD]``.

FOLDER/NAME-K.json gets what rank K ends with. With LOAD the cases continue from the checkpoints in
that folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import nfold
from integration.scripts.own_model import made
from nfold.engines.torch.communication import sharded_optimizer

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}


class Net(nn.Module):
    """Layers of different sizes, one in channels_last, one frozen until the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(2, 8, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 16)
        self.last = nn.Linear(16, 3)
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        images = self.image(x.view(-1, 2, 3, 1)).flatten(1)
        hidden = self.second(torch.relu(self.first(images)))
        result: Tensor = self.last(torch.relu(hidden)) + self.empty.sum()
        return result


def build_optimizers(case: dict[str, Any], model: Net) -> list[torch.optim.Optimizer]:
    build = OPTIMIZERS[case.get("optimizer", "adamw")]
    if case.get("several"):
        last = [*model.last.parameters(), model.empty]
        others = [p for name, p in model.named_parameters() if not name.startswith(("last", "em"))]
        return [build(others), torch.optim.SGD(last, lr=0.05, momentum=0.5)]
    bias = [p for p in model.parameters() if p.dim() == 1]
    weights = [p for p in model.parameters() if p.dim() > 1]
    return [build([{"params": weights, "weight_decay": 0.1}, {"params": bias, "lr": 0.02}])]


def main(case: dict[str, Any], name: str, folder: Path, load: Path | None) -> None:
    run = nfold.Run(**{"device": "cpu", **case.get("plan", {})})
    torch.manual_seed(3)
    torch.backends.cudnn.deterministic = True
    model = Net()
    model.second.requires_grad_(False)
    optimizers = build_optimizers(case, model)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 3, gamma=0.5) for one in optimizers]
    run.prepare(model, *optimizers, *schedules)
    loader = run.loader(made(), batch_size=10)
    first = 0
    if load is not None:
        assert run.resume(load / case.get("from", name)) is not None
        first = loader.position.epoch
    kept_gradients = []

    @run.step
    def train_step(x: Tensor, y: Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = [p.grad for p in model.parameters()]
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        now = (p.grad for p in model.parameters())
        kept_gradients.append(all(a is b for a, b in zip(before, now, strict=True)))

    for epoch in range(first, 4):
        model.second.requires_grad_(epoch > 0)
        for x, y in loader:
            train_step(x, y)
        if epoch == 1 and load is None:
            run.checkpoint(folder / name)
    found = {
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "state_bytes": [state_bytes(optimizer) for optimizer in optimizers],
        "kept_gradients": all(kept_gradients),
        "steps": run.steps,
    }
    (folder / f"{name}-{run.rank}.json").write_text(json.dumps(found))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.dim())


if __name__ == "__main__":
    load = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        with mock.patch.object(
            sharded_optimizer, "MESSAGE_BYTES", case.get("message_bytes", 2**26)
        ):
            main(case, name, Path(sys.argv[2]), load)
