"""A training step's kernels by kind against what they could not be faster than, on one GPU.

    python benchmarks/kernels.py cnn10 --batch 512 [--set kernels=tuned] [--out kernels.json]

The steps are nfold's own under a plan (bf16, compiled and captured, resident data where nothing
else is said), traced by PyTorch's profiler after its warm-up. Floors are of the layers as they are,
each pass by itself: of a convolution the longer of its arithmetic and its bytes, of a batch norm
with its activation every byte it must read and write where nothing of it lies in a convolution's
kernel, of the optimizer parameters, gradients and momentum. Constants are this card's, measured:
790 TFLOP/s in bf16, 4.25 TB/s.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.engines.base import Task
from nfold.engines.rank_process import pin_to_cores
from nfold.engines.torch.devices import open_devices
from nfold.engines.torch.step.cuda_graph import WARM_UP_CALLS
from nfold.engines.torch.step.training_step import group_batches
from nfold.engines.torch.trainer import Trainer
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.workloads import info

FLOPS = 790e12
BYTES = 4.25e12
ELEMENT = 2
"""Bytes of a number in bf16."""
PASSES = ("forward", "data gradient", "weight gradient")
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("weight gradient", ("wgrad",)),
    ("data gradient", ("dgrad",)),
    ("forward", ("fprop", "implicit_gemm", "implicit_convolve")),
    ("optimizer", ("multi_tensor", "fusedoptimizer", "sgd")),
    ("layout", ("nchwtonhwc", "nhwctonchw", "transpose")),
    ("generated", ("triton",)),
    ("matrix product", ("gemm", "cutlass", "cublas", "nvjet")),
    ("copies and fills", ("memcpy", "memset", "fill")),
)
"""A kernel's kind by what stands in its name, the first that fits."""
Kernel = tuple[str, float, float]
"""Name, how often in a step, ms a step."""


@dataclass
class Row:
    """Kernels of one kind in a step; the floor where one is known."""

    kind: str
    count: float
    ms: float
    floor_ms: float | None = None


def kind_of(name: str) -> str:
    """What a kernel does, by its name."""
    small = name.lower()
    return next((kind for kind, parts in KINDS if any(p in small for p in parts)), "other")


def steps_of(trainer: Trainer) -> Iterable[int]:
    """Train without end; yields how many steps were queued."""
    trainer.model.train()
    together = trainer.task.plan.steps_per_execution
    for epoch in itertools.count():
        trainer.source.epoch = epoch
        for batches in group_batches(
            trainer.source, together, single_batches=0 if epoch else WARM_UP_CALLS
        ):
            trainer.run_steps(batches, 0)
            yield len(batches)


def made(steps: Iterable[int], count: int) -> int:
    """Queue at least ``count`` of the steps; returns how many."""
    done = 0
    for more in steps:
        done += more
        if done >= count:
            break
    return done


def traced(trainer: Trainer, count: int, warmup: int) -> tuple[list[Row], list[Kernel], float]:
    """Rows by kind, the single kernels (name, count and ms a step), and ms from step to step."""
    steps = iter(steps_of(trainer))
    made(steps, warmup)
    torch.cuda.synchronize()
    began = time.perf_counter()
    plain = made(steps, count)
    torch.cuda.synchronize()
    step_ms = (time.perf_counter() - began) * 1e3 / plain
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        done = made(steps, count)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = collections.defaultdict(list)
    for event in trace.events() or ():
        if str(event.device_type).endswith("CUDA"):
            found[event.name].append(event.time_range.elapsed_us())
    single = [(name, len(us) / done, sum(us) / 1e3 / done) for name, us in found.items()]
    rows: dict[str, Row] = {}
    for name, number, ms in single:
        row = rows.setdefault(kind_of(name), Row(kind_of(name), 0.0, 0.0))
        row.count, row.ms = row.count + number, row.ms + ms
    return list(rows.values()), sorted(single, key=lambda one: -one[2]), step_ms


def floors(trainer: Trainer) -> dict[str, float]:
    """ms a step that each kind cannot go below, from the shapes of one forward pass."""
    shapes: list[tuple[nn.Module, Tensor, Tensor]] = []

    def seen(module: nn.Module, given: Any, result: Any) -> None:
        shapes.append((module, given[0].detach(), result.detach()))

    layers = [m for m in trainer.module.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d)]
    hooks = [layer.register_forward_hook(seen) for layer in layers]
    with torch.no_grad():
        trainer.module.eval()
        batch = next(iter(trainer.source))
        epoch = torch.zeros((), dtype=torch.int64, device=trainer.devices.primary)
        trainer.module(trainer.prepare(trainer.source.unpack(batch.tensors), epoch))
    for hook in hooks:
        hook.remove()
    found = dict.fromkeys((*PASSES, "generated", "optimizer"), 0.0)
    for number, (module, given, result) in enumerate(shapes):
        if isinstance(module, nn.Conv2d):
            for name in PASSES:
                if number or name != "data gradient":  # images need none
                    found[name] += _convolution(module, given, result)
        else:
            # Forward reads twice and writes; backward reads input and gradient twice and writes.
            found["generated"] += 8 * result.numel() * ELEMENT / BYTES * 1e3
    numbers = sum(p.numel() for p in trainer.module.parameters())
    found["optimizer"] = numbers * 20 / BYTES * 1e3
    return found


def _convolution(module: nn.Conv2d, given: Tensor, result: Tensor) -> float:
    """ms of one pass of a convolution, the same work in each."""
    work = 2 * result.numel() * module.weight[0].numel()
    moved = (given.numel() + result.numel() + module.weight.numel()) * ELEMENT
    return max(work / FLOPS, moved / BYTES) * 1e3


def planned(workload: str, batch: int, device: str, fields: list[str]) -> Task:
    """One device's task: whole batches of resident data, ``fields`` of the plan as said."""
    asked = Workload.parse(workload)
    known = info(asked.name)
    cuda = {"precision": "bf16", "step": "compiled+captured"} if device == "cuda" else {}
    said = dict(text.split("=", 1) for text in fields)
    plan = Plan(device=device, devices=1, batch=batch, epochs=1)
    plan = plan.edit(**{"input": "resident", **cuda, **said})
    machine = inspect_machine()
    return Task(
        # An incomplete last batch would be recorded, and timed, as another graph.
        workload=asked.with_parameters(samples=known.training_samples // batch * batch),
        plan=plan.resolve(machine, known.defaults),
        machine=machine,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("workload")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=60)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    task = planned(asked.workload, asked.batch, "cuda", asked.set)
    with pin_to_cores(task.plan, 0):
        trainer = Trainer(task, open_devices(task))
        rows, single, step_ms = traced(trainer, asked.steps, asked.warmup)
        least = floors(trainer)
    for row in rows:
        row.floor_ms = least.get(row.kind)
    show(sorted(rows, key=lambda row: -row.ms), single, step_ms)
    if asked.out:
        written = {"step_ms": step_ms, "rows": [asdict(row) for row in rows], "kernels": single}
        asked.out.write_text(json.dumps({"asked": str(asked), **written}, indent=1) + "\n")


def show(rows: list[Row], single: list[Kernel], step_ms: float) -> None:
    """The table, and the longest kernels."""
    print(f"step {step_ms:.3f} ms, kernels {sum(row.ms for row in rows):.3f} ms")
    print(f"{'kind':<18} {'kernels':>8} {'ms':>8} {'floor':>8}")
    for row in rows:
        floor = "" if row.floor_ms is None else f"{row.floor_ms:.3f}"
        print(f"{row.kind:<18} {row.count:>8.1f} {row.ms:>8.3f} {floor:>8}")
    for name, count, ms in single[:15]:
        print(f"{ms:>8.3f} ms {count:>6.1f} × {name[:80]}")


if __name__ == "__main__":
    main()
