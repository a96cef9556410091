"""What the dosed scripts share: their arguments, pictures, network and clock."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import rota
import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

from pictures import mnist

CUDA = torch.cuda.is_available()
WARMUP = 15
CHANNELS = 8 if CUDA else 1
"""Of the pictures, all alike. With one, cuDNN transposes around the first convolution of a network
in channels_last, and that is a fault of its own."""
WHOLE = 60_000
"""Pictures in an epoch on GPUs: as many as the training set has."""


def asked() -> argparse.Namespace:
    """The same arguments for all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000, help="timed, after the warm-up")
    parser.add_argument("--batch", type=int, default=256 if CUDA else 64, help="of one device")
    parser.add_argument("--width", type=int, default=128 if CUDA else 12)
    # Without workers a GPU's 5 ms wait for 0.6 ms of loading: that is a fault of its own.
    parser.add_argument("--workers", type=int, default=2 if CUDA else 0, help="of one device")
    return parser.parse_args()


def pictures() -> TensorDataset:
    """MNIST in single precision; for GPUs its test set several times, or epochs were very short."""
    images, labels = mnist()
    times = -(-WHOLE // len(images)) if CUDA else 1
    every = (images.float() / 255).repeat(times, 1, 1, 1).expand(-1, CHANNELS, -1, -1)
    return TensorDataset(every, labels.repeat(times))


def network(width: int) -> nn.Module:
    """Four convolutions and a classifier, the same weights everywhere.

    On GPUs in channels_last: otherwise cuDNN's transposes are a fault of their own.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (CHANNELS, width, width, width):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, 10)]
    order = torch.channels_last if CUDA else torch.contiguous_format
    return nn.Sequential(*layers).to(memory_format=order)


class Clock:
    """Says when enough steps are done, and then prints what one of them took; so in every turn."""

    def __init__(self, steps: int) -> None:
        self._left = WARMUP + steps
        self._steps = steps
        self._begin = 0.0

    def step(self) -> bool:
        """One more; whether it was the last."""
        self._left -= 1
        if self._left == self._steps:
            self._begin = self._now()
        if self._left:
            return False
        taken = (self._now() - self._begin) * 1e3 / self._steps
        print(json.dumps({"step_ms": taken, "turn": rota.turn()}), flush=True)
        self._left = WARMUP + self._steps
        return not rota.next_turn()

    def _now(self) -> float:
        if CUDA:
            torch.cuda.synchronize()
        return time.perf_counter()
