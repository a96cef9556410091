"""What nfold's own part of a script's step is: a script of very short steps, alone and explained.

    python benchmarks/diagnosis/script_cost.py [--repeats 5]

Alone it times itself, with its DataLoader and with batches that it keeps; explained, nfold times
the same. Both in turns, on one core of the same host.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

from asking_nfold import explained

from nfold.core.format import format_parenthesized_range
from nfold.core.stats import bootstrap

EPOCHS, TIMED = 200, 40
"""Of the script alone, and how many of them are one number."""


def train(epochs: int, *, kept: bool) -> list[float]:
    """Microseconds a step, over 4,000 of them each, of a model with five parameters."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(800, 4), torch.zeros(800, 1)), 8)
    batches = list(loader) if kept else loader
    found, began, steps = [], time.perf_counter(), 0
    for epoch in range(epochs):
        for features, wanted in batches:
            loss = (model(features) - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
        if epoch % TIMED == TIMED - 1:
            now = time.perf_counter()
            found.append(1e6 * (now - began) / steps)
            began, steps = now, 0
    return found


def alone(*, kept: bool) -> float:
    """Microseconds a step by the script's own clock."""
    told = [sys.executable, __file__, "--train", str(EPOCHS), *(["--kept"] if kept else [])]
    done = subprocess.run(told, stdout=subprocess.PIPE, check=True, text=True, preexec_fn=_one_core)
    return median(json.loads(done.stdout))


def by_nfold() -> tuple[float, float]:
    """The same by nfold, with real batches and with those that are given again."""
    command = [__file__, "--devices", "cpu:1", "--", "--train", "1000000"]
    found = explained(command, "8s")
    return _step_us(found["one_device"]), _step_us(found["device_bound"])


def _step_us(speed: Any) -> float:
    return float(1e3 * speed["step_ms"]["value"])


def _one_core() -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train", type=int, metavar="EPOCHS", help="be the script")
    parser.add_argument("--kept", action="store_true", help="of batches that it keeps")
    asked = parser.parse_args()
    if asked.train:
        print(json.dumps(train(asked.train, kept=asked.kept)))
        return
    more: dict[str, list[float]] = {"real": [], "given again": []}
    for number in range(asked.repeats):
        real, again = by_nfold()
        own, kept = alone(kept=False), alone(kept=True)
        more["real"].append(real - own)
        more["given again"].append(again - kept)
        print(f"{number}: alone {own:.0f} us, kept {kept:.0f}; nfold {real:.0f}, {again:.0f}")
    for name, found in more.items():
        cost = bootstrap(found)
        print(
            f"{name}: {cost.value:.0f} us a step more{format_parenthesized_range(cost, '{:.0f}')}"
        )


if __name__ == "__main__":
    main()
