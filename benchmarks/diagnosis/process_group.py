"""Compare a switchable process group with nfold's patches of collectives.

Trains small models on PyTorch's own group, with nfold's patches (``exchange`` interleaved between
``real`` and ``none``), and on a switchable group; steps alternate. Prints the CPU time that each
adds to a step on the thread that trains, with a 95 % interval over models; whether losses equal
those of PyTorch's group; and the collectives that reach the backend, without and with ``none``.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nfold.core.variant import Variant
from nfold.engines.interleaver import ActiveVariant
from nfold.instrument.hooks import distributed_hooks as hooks
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.runtime_hooks import EventCounter

WIDTH, LAYERS, STEPS = 32, 50, 5
WAYS = "plain", "patches", "group"
CASES = "DDP 1", "DDP 10", "DDP 50", "FSDP2 10", "SyncBatchNorm 10"
VARIANTS = {"real": Variant(), "none": Variant(exchange="none")}
LOCAL: dict[str, Any] = {  # by the names before and since PyTorch 2.13
    **dict.fromkeys(("allreduce", "broadcast", "barrier"), lambda *_: None),
    **dict.fromkeys(("_allgather_base", "all_gather_single"), hooks._fill_tensor),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), hooks._fill_tensor),
    "allgather": lambda outputs, inputs, *_: hooks._all_gather(outputs[0], inputs[0]),
}


class SwitchableGroup(dist.ProcessGroup):
    """Takes the place of a process group, whose backends it shares. ``mode`` is an exchange."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.mode = inner, "real"
        for device in inner._device_types:
            self._register_backend(device, self.BackendType.GLOO, inner._get_backend(device))
        self._set_default_backend(self.BackendType.GLOO)
        self._set_group_name(inner.group_name)
        world = distributed_c10d._world
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag"):
            table = getattr(world, name)
            table[self] = table.pop(inner)
        for groups in world.tags_to_pg.values():
            groups[:] = [self if group is inner else group for group in groups]
        distributed_c10d._unregister_process_group(inner.group_name)
        distributed_c10d._register_process_group(inner.group_name, self)


def switchable(name: str) -> Any:
    def collective(self: Any, *args: Any) -> Any:
        if self.mode == "real":
            return getattr(self.inner, name)(*args)
        LOCAL[name](*args)
        own = args[0] if args and isinstance(args[0], list) else list(args[:1])
        done: Any = torch.futures.Future()
        done.set_result(own)
        if self.mode != "none":
            sent = [torch.zeros(1)]
            if self.mode == "half":
                sent = [tensor.view(-1)[: tensor.numel() // 2] for tensor in own]
            done = self.inner.allreduce(sent).get_future().then(lambda _: own)
        return _create_work_from_future(done)

    return collective


for _name in LOCAL:
    if hasattr(dist.ProcessGroup, _name):
        setattr(SwitchableGroup, _name, switchable(_name))


class SynchronisedMean(torch.autograd.Function):
    """The collectives of nn.SyncBatchNorm, whose kernels need a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Any:
        ctx.group = group
        means = [torch.empty(WIDTH) for _ in range(group.size())]
        dist.all_gather(means, x.mean(0), group)
        return x - torch.stack(means).mean(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        mean = gradients[0].mean(0)
        dist.all_reduce(mean, group=ctx.group)
        return gradients[0] - mean / ctx.group.size(), None


def build_module(case: str, group: Any) -> nn.Module:
    """Return DDP with that number of buckets, or as many wrapped or synchronised layers."""
    kind, number = case.split()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    if kind == "DDP":
        bucket_mb = WIDTH * WIDTH * 4 * LAYERS / int(number) / 2**20
        module = nn.Sequential(*layers)
        return DistributedDataParallel(module, process_group=group, bucket_cap_mb=bucket_mb)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in layers[: int(number)]:
        if kind == "FSDP2":
            fully_shard(layer, mesh=mesh)
        else:
            layer.register_forward_hook(lambda *call: SynchronisedMean.apply(call[2], group))
    return nn.Sequential(*layers[: int(number)])


class Comparison:
    """The three copies of a model."""

    def __init__(self, case: str, order: Sequence[str]) -> None:
        variants = tuple(VARIANTS.values())
        task: Any = SimpleNamespace(variant=variants[0], interleaved_variants=variants)
        self.variant, self.patches = ActiveVariant(task), Patches()
        self.wrappers = hooks.DataParallelHooks(self.variant, lambda: None)
        self.collectives = hooks.CollectiveHooks(self.variant, EventCounter())
        self.collectives.on_first_step()
        self.groups: dict[str, Any] = {way: dist.new_group() for way in WAYS}
        self.groups["group"] = SwitchableGroup(self.groups["group"])
        self.inputs, self.modules = torch.randn(4, WIDTH), {}
        for way in order:
            with self.exchange(way, "real"):
                self.modules[way] = build_module(case, self.groups[way])

    @contextmanager
    def exchange(self, way: str, mode: str) -> Iterator[None]:
        self.variant.current, self.groups["group"].mode = VARIANTS[mode], mode
        if way == "patches":
            warm_up = Patches()
            self.wrappers.install(self.patches, warm_up)
            warm_up.undo()
            self.collectives.install(self.patches, self.patches)
        try:
            yield
        finally:
            self.patches.undo()

    def train(self, way: str, mode: str = "real") -> tuple[list[float], float]:
        """Return the losses, and the shortest step in microseconds without the first."""
        module, losses, seconds = self.modules[way], [], []
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with self.exchange(way, mode):
            for _ in range(STEPS):
                started = time.thread_time()
                loss = module(self.inputs).square().mean()
                loss.backward()
                seconds.append(time.thread_time() - started)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses, 1e6 * min(seconds[1:])

    def collectives_per_step(self, way: str, mode: str) -> int:
        group = getattr(self.groups[way], "inner", self.groups[way])
        before = group._get_sequence_number_for_group()
        self.train(way, mode)
        return (group._get_sequence_number_for_group() - before) // STEPS


def compare(case: str, models: int, rounds: int) -> str:
    """Return a line of the table."""
    added: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(models):
        order = WAYS[number % 3 :] + WAYS[: number % 3]
        compared = Comparison(case, order)
        losses = [compared.train(way)[0] for way in WAYS]
        us = dict.fromkeys(WAYS, math.inf)
        for _ in range(rounds):
            us = {way: min(us[way], compared.train(way)[1]) for way in order}
        for way in WAYS:
            added[way].append(us[way] - us["plain"] * (way != "plain"))
    line = f"{case:18}{statistics.median(added['plain']):8.0f}"
    for way in WAYS[1:]:
        half = 1.96 * statistics.stdev(added[way]) / len(added[way]) ** 0.5
        line += f"{statistics.fmean(added[way]):+10.1f} ±{half:5.1f}"
    counts = [compared.collectives_per_step(way, "none") for way in WAYS[1:]]
    line += f"  {losses[0] == losses[1]!s:5} {losses[0] == losses[2]!s:5}"
    return f"{line}{compared.collectives_per_step('plain', 'real'):9} {counts[0]:7} {counts[1]:5}"


def run_rank(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    if rank == 0:
        print(f"{'case':18}{'plain µs':>8}{'patches add':>17}{'group adds':>17}", end="")
        print("  equal losses  collectives: plain, patches none, group none")
    for case in options.cases:
        line = compare(case, options.models, options.rounds)
        if rank == 0:
            print(line, flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", type=int, default=8, help="copies built for each case")
    parser.add_argument("--rounds", type=int, default=10, help=f"of {STEPS} steps for each model")
    parser.add_argument("--cases", nargs="+", default=CASES, help="such as 'DDP 10'")
    options = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29600 + os.getpid() % 1000)}
    torch.multiprocessing.spawn(run_rank, (options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
