"""The prototype by hand: as ``resident``, and the whole step with DDP is one CUDA graph.

DDP is built, warmed up and captured on one side stream; it rearranges its buckets in its first
steps, so that the capture comes after eleven. The fields are those of ``resident``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from common import joined, opened, turns_of
from job import Job, run
from resident import Step
from torch import Tensor
from turns import Turns

from nfold.engines.torch.devices import Devices

EAGER_STEPS = 12


class Captured:
    """A step recorded once and replayed on other samples."""

    def __init__(self, step: Callable[[Tensor], Tensor], like: Tensor, stream: torch.cuda.Stream):
        self._ids = like.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self._loss = step(self._ids)

    def __call__(self, ids: Tensor) -> Tensor:
        self._ids.copy_(ids)
        self.graph.replay()
        return self._loss


def main(job: Job) -> None:
    if job.device != "cuda":
        raise ValueError("the prototype captures a CUDA graph; allowed is --device cuda")
    devices = opened(job)
    torch.backends.cudnn.benchmark = True
    with joined(job, devices):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            train(job, devices, stream)


def train(job: Job, devices: Devices, stream: torch.cuda.Stream) -> None:
    step = Step(job, devices.primary)
    turns = turns_of(job, devices, warmup=2 * EAGER_STEPS)
    orders = step.data.orders()
    for _ in range(EAGER_STEPS):
        ids = next(orders)
        turns.step(step(ids))
    devices.synchronize()
    replay(Captured(step, ids, stream), orders, turns)


def replay(captured: Captured, orders: Iterator[Tensor], turns: Turns) -> None:
    """Until the driver stops; a process group does not end while a graph holds its exchange."""
    try:
        for ids in orders:
            turns.step(captured(ids))
    finally:
        torch.cuda.synchronize()
        captured.graph.reset()


if __name__ == "__main__":
    run(main)
