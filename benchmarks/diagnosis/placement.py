"""How long equal work takes, as often as its network is made anew: by where its tensors lie.

    torchrun --nproc-per-node 2 benchmarks/diagnosis/placement.py --out placement

The network of the dosed scripts alone, in DistributedDataParallel, and in one that exchanges
nothing, with gradients of their own and with gradients that are views of its buckets. They take
turns, forwards and backwards; kernels are timed by a profiler afterwards. Each rank writes a file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

sys.path.append(str(Path(__file__).resolve().parent / "dosed"))

from parts import CHANNELS, CUDA, network

MADE = ("alone", "exchanging", "exchanging nothing", "exchanging nothing, in views")
BATCH, SIDE = 256, 28
SETTLE, TRACED, LARGEST = 10, 20, 12
Step = Callable[[], None]


def main() -> None:
    """Time all of them in turn, then trace each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--width", type=int, default=288 if CUDA else 12)
    parser.add_argument("--steps", type=int, default=60, help="timed in a turn")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("placement"), help="folder of results")
    asked = parser.parse_args()
    dist.init_process_group("nccl" if CUDA else "gloo")
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    steps = {made: _step(made, asked.width, device) for made in MADE}
    for step in steps.values():
        _repeat(step, SETTLE)
    step_ms = defaultdict(list)
    for turn in range(asked.turns):
        for made in MADE[:: -1 if turn % 2 else 1]:
            _repeat(steps[made], SETTLE)
            step_ms[made].append(_timed_ms(steps[made], asked.steps))
    found = {"step_ms": step_ms, "kernels": {made: _kernels(step) for made, step in steps.items()}}
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / f"rank-{rank}.json").write_text(json.dumps(found, indent=1))
    for made, times in step_ms.items():
        print(f"rank {rank}, {made}: {', '.join(f'{ms:.2f}' for ms in times)} ms", flush=True)
    dist.destroy_process_group()


def _step(made: str, width: int, device: torch.device) -> Step:
    model = network(width).to(device)
    if made != MADE[0]:
        views = made.endswith("in views")
        model = DistributedDataParallel(model, gradient_as_bucket_view=views)
        if "nothing" in made:
            model.register_comm_hook(None, noop_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.rand(BATCH, CHANNELS, SIDE, SIDE, device=device)
    labels = torch.randint(10, (BATCH,), device=device)

    def step() -> None:
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _repeat(step: Step, times: int) -> None:
    for _ in range(times):
        step()


def _timed_ms(step: Step, times: int) -> float:
    """Milliseconds of a step."""
    _wait()
    begin = time.perf_counter()
    _repeat(step, times)
    _wait()
    return (time.perf_counter() - begin) * 1e3 / times


def _kernels(step: Step) -> list[tuple[str, float]]:
    """Those that take most, with their milliseconds a step."""
    activity = ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU
    _repeat(step, SETTLE)
    _wait()
    with profile(activities=[activity]) as traced:
        _repeat(step, TRACED)
        _wait()
    name = "self_device_time_total" if CUDA else "self_cpu_time_total"
    found = [(one.key, getattr(one, name) / 1e3 / TRACED) for one in traced.key_averages()]
    return sorted(found, key=lambda one: -one[1])[:LARGEST]


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
