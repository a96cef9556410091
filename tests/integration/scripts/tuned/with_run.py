"""Train with nfold.Run, and print the plan."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

import nfold

MARK = "facts "


def main() -> None:
    """Train endlessly."""
    run = nfold.Run(precision="fp32")
    data = torch.utils.data.TensorDataset(torch.randn(256, 64), torch.randint(0, 4, (256,)))
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
    model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader = run.loader(data, batch_size=16)
    facts = {"precision": run.plan.precision, "exchange": run.plan.exchange}
    sys.stdout.write(f"{MARK}{json.dumps(facts)}\n")
    sys.stdout.flush()
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


if __name__ == "__main__":
    main()
