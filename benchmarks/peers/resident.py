"""Data on the device, augmented there, model compiled, DDP; every step launched from Python.

Fields: compile=0 leaves the model as it is, compile_input=0 the augmentation, max_autotune=1
lets the compiler try more kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import bf16, built, in_parallel, joined, opened, turns_of
from device_data import DeviceData
from job import Job, run
from torch import Tensor

from nfold.engines.torch.devices import Devices

FIELDS = {"compile": 1, "compile_input": 1, "max_autotune": 0}


class Step:
    """One optimizer step on the samples that it is given; also what the prototype captures."""

    def __init__(self, job: Job, device: torch.device, **options: bool) -> None:
        chosen = job.numbers(**FIELDS)
        torch.set_float32_matmul_precision("high")
        self._device = device
        self.data = DeviceData(job, device)
        self._select: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = self.data.select
        if chosen["compile"] and chosen["compile_input"]:
            self._select = torch.compile(self.data.select, dynamic=False)
        self._training = built(job, device)
        module = self._training.module
        if chosen["compile"]:
            module = torch.compile(module, dynamic=False, **_mode(chosen["max_autotune"]))
        self._model = in_parallel(module, job, device, **options)

    def __call__(self, ids: Tensor) -> Tensor:
        """The loss on samples ``ids`` [share], not yet read."""
        images, labels = self._select(ids, self.data.draws())
        with bf16(self._device):
            loss = self._training.loss(self._model(images), labels)
        self._training.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._training.optimizer.step()
        return loss.detach()


def _mode(max_autotune: int) -> dict[str, Any]:
    return {"mode": "max-autotune-no-cudagraphs"} if max_autotune else {}


def main(job: Job) -> None:
    devices = opened(job)
    torch.backends.cudnn.benchmark = True
    with joined(job, devices):
        train(job, devices)


def train(job: Job, devices: Devices) -> None:
    step = Step(job, devices.primary, static_graph=True)
    turns = turns_of(job, devices)
    for ids in step.data.orders():
        turns.step(step(ids))


if __name__ == "__main__":
    run(main)
