"""A network's first convolution as cuDNN's, and as a matrix product of patches, on one GPU.

    python benchmarks/first_convolution.py cnn10 --batch 512 [--set kernels=tuned] [--pairs 40]

nfold takes the product where it was faster here (docs/decisions/kernels-and-layout.md).
Two trainings of the same weights on the same samples, one of each kind, take turns of 50 steps in
one process; ratios are formed pair by pair. Losses of their first steps stand beside.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from typing import Any

import torch
from kernels import made, planned, steps_of
from own_cost import alternating
from torch import nn

from nfold.core.serialization import serialize
from nfold.core.stats import bootstrap, paired_ratio
from nfold.engines.rank_process import pin_to_cores
from nfold.engines.torch.devices import open_devices
from nfold.engines.torch.layout import IM2COL_CLASS, is_eligible
from nfold.engines.torch.trainer import Trainer

BLOCK = 50
WARM_UP = 60


def first_of(module: nn.Module) -> nn.Module:
    """The first convolution, if it can be a product."""
    found = next(m for m in module.modules() if isinstance(m, nn.Conv2d))
    if not isinstance(found, IM2COL_CLASS) and not is_eligible(found):
        raise ValueError(f"{found} cannot be a product of patches")
    return found


class Arm:
    """One training, made in blocks."""

    def __init__(self, task: Any, *, product: bool) -> None:
        self.trainer = Trainer(task, open_devices(task))
        first_of(self.trainer.module).__class__ = IM2COL_CLASS if product else nn.Conv2d
        self.first_losses = self._first_losses()
        self._steps = iter(steps_of(self.trainer))
        self.block(WARM_UP)

    def _first_losses(self) -> list[float]:
        self.trainer.model.train()
        batches = itertools.islice(self.trainer.source, 5)
        return [float(self.trainer.step(batch)) for batch in batches]

    def block(self, count: int = BLOCK) -> float:
        """Seconds a step, over at least so many."""
        self.trainer.devices.synchronize()
        began = time.perf_counter()
        done = made(self._steps, count)
        self.trainer.devices.synchronize()
        return (time.perf_counter() - began) / done


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("workload")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    asked = parser.parse_args()
    task = planned(asked.workload, asked.batch, asked.device, asked.set)
    with pin_to_cores(task.plan, 0):
        arms = [Arm(task, product=product) for product in (False, True)]
        blocks = [arm.block for arm in arms]
        usual, product = zip(*alternating(*blocks, asked.pairs), strict=True)
    found = {
        "workload": str(task.workload),
        "torch": torch.__version__,
        "step_ms": serialize(bootstrap([1e3 * seconds for seconds in usual])),
        "of_patches_ms": serialize(bootstrap([1e3 * seconds for seconds in product])),
        "ratio": serialize(paired_ratio(usual, product)),
        "first_losses": [arm.first_losses for arm in arms],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
