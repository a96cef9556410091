"""A model of a user's own, trained by one of several loops on synthetic batches on the devices.

``loop=ddp`` is careful DistributedDataParallel: bf16 autocast, channels_last for images, fused
optimizer, ``gradient_as_bucket_view``, static graph, cudnn.benchmark, TF32 in fp32 products;
``compile=1`` compiles the model. ``loop=run`` is ``nfold.Run`` as a user writes it, with a plain
optimizer; ``decorate=1`` marks the step with ``@run.step``; with ``replicas=1`` every rank trains
its share of the batch by itself, without communication; other fields are those of its plan.
``loop=fabric`` and ``loop=accelerate`` are Lightning Fabric and Hugging Face Accelerate.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import bf16, in_parallel, joined, opened, turns_of
from job import Job, run
from own_model_zoo import MODELS, OwnModel
from torch import Tensor, nn

import nfold
from nfold.core.plan import MINIMUM_VALUES
from nfold.engines.torch.devices import Devices

Batch = tuple[Tensor, ...]
EPOCH_STEPS = 64
LONG = 10**6  # epochs, so that the automatic plan may take the time that it needs


def main(job: Job) -> None:
    fields = dict(job.fields)
    loop = LOOPS[fields.pop("loop")]
    devices = opened(job)
    own = MODELS[job.workload.name]
    torch.manual_seed(0)
    loop(job, devices, own, fields)


def train_ddp(job: Job, devices: Devices, own: OwnModel, fields: dict[str, str]) -> None:
    device = devices.primary
    be_careful()
    with joined(job, devices):
        model = own.model().to(device)
        if own.has_images:
            model = model.to(memory_format=torch.channels_last)
        optimizer = own.optimizer(model, fused=device.type == "cuda")
        parallel = in_parallel(model, job, device, static_graph=True)
        if fields.get("compile"):
            parallel = torch.compile(parallel)
        turns = turns_of(job, devices)
        for batch in batches(job, device, own):
            with bf16(device):
                loss = own.loss(parallel, *batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            turns.step(loss.detach())


def be_careful() -> None:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = True


def batches(job: Job, device: torch.device, own: OwnModel) -> Iterator[Batch]:
    """Yield batches of the samples on the device, images in channels_last."""
    samples = own.samples(EPOCH_STEPS * job.share, device)
    if own.has_images:
        images, labels = samples
        samples = images.contiguous(memory_format=torch.channels_last), labels
    while True:
        for ids in torch.randperm(len(samples[0]), device=device).split(job.share):
            yield tuple(each[ids] for each in samples)


def train_run(job: Job, devices: Devices, own: OwnModel, fields: dict[str, str]) -> None:
    batch = job.batch
    if fields.pop("replicas", "") == "1":
        # LOCAL_RANK stays, which selects the device. Windows count the samples of all replicas.
        batch, job = job.share, dataclasses.replace(job, rank=0, world_size=1)
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    elif job.world_size == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    decorate = fields.pop("decorate", "") == "1"
    safe: Any = fields.pop("plan", None)
    plan: dict[str, Any] = {
        name: int(value) if name in MINIMUM_VALUES else value for name, value in fields.items()
    }
    half = "bf16" if job.device == "cuda" else "fp32"
    run = nfold.Run(safe, **{"precision": half, **plan})
    model = own.model()
    optimizer = own.optimizer(model)
    model, optimizer = run.prepare(model, optimizer)

    def train_step(batch: Batch) -> Tensor:
        loss = own.loss(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = run.step(train_step) if decorate else train_step
    samples = own.samples(EPOCH_STEPS * batch, devices.primary)
    loader = run.loader(samples, batch_size=batch, epochs=LONG)
    model.train()
    turns = None
    for _ in itertools.count():
        for batch in loader:
            loss = step(batch)
            if turns is None and not run.is_choosing:
                turns = turns_of(job, devices)
            if turns is not None:
                turns.step(loss)


def train_fabric(job: Job, devices: Devices, own: OwnModel, fields: dict[str, str]) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    del fields
    be_careful()
    several: dict[str, Any] = {
        "strategy": DDPStrategy(gradient_as_bucket_view=True, static_graph=True),
        "plugins": [TorchElasticEnvironment()],
    }
    fabric = Fabric(
        accelerator="gpu" if devices.is_cuda else "cpu",
        devices=job.world_size,
        precision="bf16-mixed",
        **(several if job.world_size > 1 else {}),
    )
    fabric.launch()
    model = own.model()
    if own.has_images:
        model = model.to(memory_format=torch.channels_last)
    model, optimizer = fabric.setup(model, own.optimizer(model, fused=devices.is_cuda))
    train_simply(job, devices, own, model, optimizer, fabric.backward)


def train_accelerate(job: Job, devices: Devices, own: OwnModel, fields: dict[str, str]) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    del fields
    if job.world_size == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    be_careful()
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)
    accelerator = Accelerator(
        mixed_precision="bf16", cpu=not devices.is_cuda, kwargs_handlers=[options]
    )
    model = own.model()
    if own.has_images:
        model = model.to(memory_format=torch.channels_last)
    optimizer = own.optimizer(model, fused=devices.is_cuda)
    model, optimizer = accelerator.prepare(model, optimizer)
    train_simply(job, devices, own, model, optimizer, accelerator.backward)


def train_simply(
    job: Job,
    devices: Devices,
    own: OwnModel,
    model: nn.Module,
    optimizer: Any,
    backward: Callable[[Tensor], Any],
) -> None:
    turns = turns_of(job, devices)
    for batch in batches(job, devices.primary, own):
        loss = own.loss(model, *batch)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        turns.step(loss.detach())


LOOPS = {
    "ddp": train_ddp,
    "run": train_run,
    "fabric": train_fabric,
    "accelerate": train_accelerate,
}

if __name__ == "__main__":
    run(main)
