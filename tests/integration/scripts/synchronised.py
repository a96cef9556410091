"""One rank with batch norm over the global batch: ``synchronised.py FOLDER [cuda]``.

FOLDER/K.pt gets what rank K found: of single layers, and on CPU devices of a built-in workload's
losses; on GPUs nothing may wait for the device in between.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import made
from nfold import data
from nfold.core.plan import Plan
from nfold.data.arrays import DataSetArrays
from nfold.engines.sampling import BatchShare
from nfold.engines.torch import trainer as trainer_module
from nfold.engines.torch.batch import CurrentShare, InputSamples, loss_weighted_share
from nfold.engines.torch.batch_norm import synchronize_batch_norm
from nfold.engines.torch.communication import data_parallel
from nfold.engines.torch.devices import open_devices
from nfold.engines.torch.input.batch_source import PrepareInput, build_preparation
from nfold.launch.rank_lifecycle import exit_after_handlers
from nfold.workloads import torch_networks as definition

COUNTS = {2: (2, 5), 3: (4, 0, 3), 4: (2, 2, 2, 1)}
"""Samples of each rank, of seven; one that has none pads with the first, which counts nothing."""
SHAPES: dict[str, tuple[int, ...]] = {"1d": (3,), "2d": (3, 4, 2), "3d": (3, 2, 2, 2)}
NORMS: dict[str, type[Any]] = {
    "1d": nn.BatchNorm1d,
    "2d": nn.BatchNorm2d,
    "3d": nn.BatchNorm3d,
}
LAYERS: dict[str, dict[str, Any]] = {
    "1d": {},
    "2d": {},
    "3d": {},
    "loss_weighted": {"norm": "2d", "loss_weighted": True},
    "not_affine": {"norm": "2d", "affine": False},
    "no_momentum": {"norm": "2d", "momentum": None},
    "not_tracked": {"norm": "2d", "track_running_stats": False},
    "large_mean": {"norm": "2d", "dtype": torch.float32, "offset": 1000.0},
    "bf16": {"norm": "2d", "dtype": torch.bfloat16, "offset": 5.0},
    "channels_last": {"norm": "2d", "memory": torch.channels_last},
}
"""What is special in each case; its norm is its name unless it says another."""
WORKLOAD = "wide_resnet:depth=10,width=1"
TRAININGS: dict[str, dict[str, Any]] = {
    "device": {"batch_norm": "device"},
    "synchronised": {"batch_norm": "synchronised"},
    "own_exchange": {"batch_norm": "synchronised", "strategy": "nfold"},
    "in_parts": {"batch_norm": "synchronised", "strategy": "nfold", "accumulate": 3, "steps": 20},
}
TRAINED = {1: ("synchronised", "in_parts"), 2: tuple(TRAININGS), 4: ("synchronised",)}
"""Which of them every world makes; on one rank they are all the same."""


def norm_of(name: str, said: dict[str, Any]) -> str:
    return str(said.get("norm", name))


def layers(name: str) -> nn.Sequential:
    """Two batch norms with something between them that mixes neither samples nor channels."""
    said = LAYERS[name]
    options = {k: v for k, v in said.items() if k in ("affine", "momentum", "track_running_stats")}
    kind = NORMS[norm_of(name, said)]
    torch.manual_seed(1)
    module = nn.Sequential(kind(3, **options), nn.Tanh(), kind(3, eps=0.1, **options))
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    kept = torch.float64 if said.get("dtype", torch.float64) is torch.float64 else torch.float32
    return module.to(kept)


def samples(name: str) -> tuple[Tensor, Tensor]:
    """Seven inputs, and what each output is multiplied with in the loss."""
    said = LAYERS[name]
    torch.manual_seed(2)
    shape = (7, *SHAPES[norm_of(name, said)])
    x = torch.randn(shape, dtype=torch.float64) + said.get("offset", 0.0)
    factors = torch.randn(shape, dtype=torch.float64)
    kind = said.get("dtype", torch.float64)
    return x.to(kind), factors.to(kind)


def losses(outputs: Tensor, factors: Tensor) -> Tensor:
    """The loss of every sample, [n]."""
    return (outputs * factors + outputs.square() / 3).flatten(1).sum(1)


def layer_case(name: str, rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """Two steps: what the second put out, its gradients, and the state after it."""
    said, module = LAYERS[name], layers(name).to(device)
    counts = COUNTS[world_size]
    count, total = counts[rank], sum(counts)
    ledger = CurrentShare(world_size)
    synchronize_batch_norm(module, Plan(batch_norm="synchronised", devices=world_size), ledger)
    first = sum(counts[:rank]) if count else 0
    own = slice(first, first + max(1, count))
    x, factors = (whole.to(device) for whole in samples(name))
    for scale in (0.5, 1.0):
        module.zero_grad()
        part = (x[own] * scale).contiguous(memory_format=said.get("memory", torch.preserve_format))
        part.requires_grad_()
        ledger.set(BatchShare(count=count, global_count=total))
        weight = count / total
        if said.get("loss_weighted"):
            ledger.set(loss_weighted_share(count, world_size))
        _let_nothing_wait(device, "error")
        outputs = module(part)
        loss = losses(outputs, factors[own]).mean()
        if said.get("loss_weighted"):
            loss, weight = loss * (count * world_size / total), 1 / world_size
        loss.backward()  # type: ignore[no-untyped-call]
        _let_nothing_wait(device, "default")
    assert part.grad is not None
    gradients = [torch.as_tensor(p.grad) * weight for p in module.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient)
    return {
        "outputs": outputs.detach()[:count].cpu(),
        "of_x": (part.grad[:count] * weight).cpu(),
        "gradients": [gradient.cpu() for gradient in gradients],
        "state": {key: value.cpu() for key, value in module.state_dict().items()},
        "padded_of_x": part.grad[count:],
        "is_channels_last": outputs.is_contiguous(memory_format=torch.channels_last)
        if outputs.dim() == 4
        else None,
    }


def _let_nothing_wait(device: torch.device, mode: str) -> None:
    """PyTorch raises where the host waits for a GPU, while ``mode`` is ``error``."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def images() -> DataSetArrays:
    """Fifty-six images of 32 × 32 in the form of CIFAR-10."""
    few = made.arrays(56)
    draw = torch.Generator().manual_seed(4)
    whole = torch.randint(256, (56, 32, 32, 3), generator=draw, dtype=torch.uint8).numpy()
    return dataclasses.replace(
        few, train_images=whole, mean=(128.0, 128.0, 128.0), std=(74.0, 74.0, 74.0)
    )


def in_double(*options: Any) -> PrepareInput:
    """What the model gets, in fp64."""
    prepare = build_preparation(*options)

    def prepared(samples: InputSamples, epoch: Tensor) -> Tensor:
        return prepare(samples, epoch).double()

    return prepared


def training(rank: int, world_size: int, **changes: Any) -> list[float]:
    """The global loss of every step in fp64; an epoch's last batch has two samples.

    In fp32 training amplifies the rounding of another order of sums beyond all comparison.
    """
    data.load = lambda _: images()  # type: ignore[assignment]
    torch.set_default_dtype(torch.float64)
    length = {"steps": 50, "warmup_steps": 0, "batch": 18, "cores_per_device": 1}
    asked = {**length, "input": "resident", **changes}
    task = made.task(rank=rank, world_size=world_size, workload=WORKLOAD, **asked)
    trainer_module.build_preparation = in_double  # type: ignore[attr-defined,assignment]
    definition.cross_entropy = nn.functional.cross_entropy  # type: ignore[assignment]
    trainer = trainer_module.Trainer(task, open_devices(task))
    found = []
    for batch in trainer.source:
        loss = trainer.step(batch) * batch.count
        found.append(float(data_parallel.all_reduce_sum(loss, world_size)) / batch.global_count)
    return found


def main(folder: Path, kind: str = "cpu") -> None:
    device = torch.device(kind, int(os.environ["RANK"]) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    if world_size > 1:
        found |= {name: layer_case(name, rank, world_size, device) for name in LAYERS}
    if kind == "cpu":
        chosen = TRAINED.get(world_size, ())
        found |= {name: training(rank, world_size, **TRAININGS[name]) for name in chosen}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    exit_after_handlers()
