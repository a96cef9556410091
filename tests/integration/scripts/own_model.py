"""Train a custom model with nfold.Run: ``own_model.py CASES.json FOLDER``.

CASES.json maps names to what is special in each case; FOLDER/NAME-K.json gets what rank K ends
with.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import nfold
from nfold.engines.torch.run import datasets

SAMPLES, FEATURES, CLASSES = 37, 6, 3
EPOCHS = 2


class Net(nn.Module):
    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.second = nn.Linear(8, CLASSES)
        self.aside = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, *, aside: bool = False) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        result: Tensor = self.aside(hidden) if aside else self.second(hidden)
        return result


class Samples(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.y[index])


def made() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def data_of(kind: str, x: Tensor, y: Tensor) -> Any:
    if kind == "arrays":
        return (x.numpy(), y.numpy())
    if kind == "dataset":
        return Samples(x, y)
    if kind == "dataloader":
        return torch.utils.data.DataLoader(Samples(x, y), batch_size=10, shuffle=True)
    return lambda: zip(x, y, strict=True)


def main(case: dict[str, Any], out: str) -> None:
    run = nfold.Run(**case.get("plan", {}))
    torch.manual_seed(run.rank if case.get("different_weights") else 3)
    model = Net(norm=bool(case.get("norm")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model, optimizer, schedule = run.prepare(model, optimizer, schedule)
    x, y = made()
    data = data_of(case.get("data", "arrays"), x, y)
    batch, shuffle = case.get("batch", 10), case.get("shuffle", True)
    with mock.patch.object(datasets, "free_bytes", return_value=case.get("free_bytes", 2**30)):
        loader = run.loader(data, batch_size=batch, shuffle=shuffle, workers=0)
    folder = Path(out).with_name(case.get("folder", "none"))
    resumed = run.resume(folder) if "folder" in case else None
    seen: list[list[float]] = []
    means: list[float] = []

    def one(inputs: Tensor, labels: Tensor) -> Tensor:
        return train_step(case, run, model, optimizer, schedule, inputs, labels)

    step = run.step(one) if case.get("run_step") else one
    for _ in range(loader.position.epoch, case.get("epochs", EPOCHS)):
        for inputs, labels in loader:
            seen.append(sorted(inputs[:, 0].tolist()))
            means.append(run.mean(step(inputs, labels), count=len(labels)))
            if run.steps == case.get("checkpoint") and resumed is None:
                run.checkpoint(folder, note="half way")
                if case.get("stop"):
                    return
        if "evaluate" in case:
            evaluate_epoch(case["evaluate"], run, folder)
    write(run, model, {"seen": seen, "means": means, "resumed": resumed}, out)


def evaluate_epoch(reduction: str, run: Any, folder: Path) -> None:
    count = sum(len(labels) for _, labels in run.loader(made(), batch_size=8, train=False))
    if reduction == "run.sum":
        run.sum(count)
    elif reduction == "all_reduce" and run.world_size > 1:
        torch.distributed.all_reduce(torch.tensor(count))
    elif reduction == "none":
        run.checkpoint(folder)


def train_step(
    case: dict[str, Any], run: Any, model: Any, optimizer: Any, schedule: Any, x: Tensor, y: Tensor
) -> Tensor:
    optimizer.zero_grad()
    aside = bool(case.get("aside_on_rank_0")) and run.rank == 0
    loss = nn.functional.cross_entropy(model(x, aside=aside), y)
    loss.backward()  # type: ignore[no-untyped-call]
    if case.get("second_backward"):
        (0.1 * model(x).square().mean()).backward()
    if case.get("clip"):
        nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
    if case.get("reads"):
        loss.item()
    optimizer.step()
    schedule.step()
    return loss.detach()


def write(run: Any, model: Any, noted: dict[str, Any], out: str) -> None:
    x, y = made()
    right = count = 0
    model.eval()
    with torch.no_grad():
        for inputs, labels in run.loader((x, y), batch_size=8, train=False):
            right += int((model(inputs).argmax(1) == labels).sum())
            count += len(labels)
    found = {
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "running": [b.tolist() for b in model.buffers()],
        "aside_has_gradient": model.aside.weight.grad is not None,
        "right": run.sum(right),
        "count": run.sum(count),
        "own_count": count,
        "mean": run.mean(float(run.rank), count=run.rank),
        "steps": run.steps,
        "model_class": type(model).__name__,
        "keys": list(model.state_dict()),
        **noted,
    }
    Path(f"{out}-{run.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for name, one in json.loads(Path(sys.argv[1]).read_text()).items():
        out = Path(sys.argv[2]) / name
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            main(one, str(out))
        texts = [str(warning.message) for warning in caught]
        rank = os.environ.get("RANK", "0")
        out.with_name(f"{name}-{rank}.warnings").write_text(json.dumps(texts))
