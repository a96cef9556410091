"""Trains a small network under an automatic or a safe plan; writes what every rank had."""

import json
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

import nfold
from nfold.engines.torch.run.prepared_module import prepared_forward

torch.manual_seed(0)
out, plan, decorated = sys.argv[1], sys.argv[2] or None, sys.argv[3] == "1"
run = nfold.Run(plan)  # type: ignore[arg-type]
model: nn.Module = nn.Sequential(
    *(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())),
    nn.Linear(64, 4),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50)
model, optimizer, schedule = run.prepare(model, optimizer, schedule)
inputs = torch.randn(4096, 64)
labels = inputs[:, :4].argmax(1)
loader = run.loader((inputs, labels, torch.arange(4096)), batch_size=128, epochs=10**7)
losses, samples = [], []


def train_step(x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    schedule.step()
    return loss.detach()


step = run.step(train_step) if decorated else train_step
for _ in range(4):
    for x, y, ids in loader:
        losses.append(step(x, y))
        samples.append(ids.sum())
result = {
    "losses": [run.mean(loss) for loss in losses],
    "samples": [int(total) for total in samples],
    "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
    "choosing": run.is_choosing,
    "compiled": prepared_forward(model).step != "eager",
}
with open(f"{out}-{run.rank}.json", "w") as file:
    json.dump(result, file)
