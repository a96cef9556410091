"""cifar_ddp.py with its batches given again by hand: what replayed and resident steps must take.

    torchrun --nproc-per-node 4 benchmarks/diagnosis/by_hand.py
    torchrun --nproc-per-node 4 benchmarks/diagnosis/by_hand.py --hook

Without nfold, with workers that are idle and with none; ``--hook`` exchanges gradients by a hook in
Python, as nfold's experiments do. Prints milliseconds a step of every phase, and of each rank those
in which its host makes one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts"))

import cifar_ddp

FILLED_S = 2.0
"""Until 14 workers have nothing more to do."""


class Training:
    """The script's model on one rank of several, and passes over what it is given."""

    def __init__(self, batch: int, workers: int, *, hook: bool) -> None:
        cuda = torch.cuda.is_available()
        rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
            torch.backends.cudnn.benchmark = True
        dist.init_process_group("nccl" if cuda else "gloo")
        torch.manual_seed(0)
        self.model = DistributedDataParallel(
            cifar_ddp.network().to(self.device, memory_format=torch.channels_last),
            device_ids=[self.device] if cuda else None,
            gradient_as_bucket_view=True,
            static_graph=True,
            broadcast_buffers=False,
        )
        if hook:
            self.model.register_comm_hook(None, allreduce_hook)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=5e-4, fused=True)
        data = cifar_ddp.Augmented()
        self.sampler = DistributedSampler(data, drop_last=True)
        self.loader = DataLoader(
            data,
            batch,
            sampler=self.sampler,
            num_workers=workers,
            pin_memory=cuda,
            persistent_workers=True,
            prefetch_factor=4,
            drop_last=True,
        )

    def step(self, pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One, as in the script."""
        pictures = pictures.to(self.device, non_blocking=True, memory_format=torch.channels_last)
        labels = labels.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = functional.cross_entropy(self.model(pictures), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss

    def passes(self, name: str, count: int, batches: Callable[[], Iterable[Any]]) -> None:
        """Time so many; the first one is not counted."""
        steps_ms, hosts_ms = [], []
        for number in range(count):
            self.sampler.set_epoch(number)
            steps, begin = 0, time.perf_counter()
            for pictures, labels in batches():
                loss = self.step(pictures, labels)
                steps += 1
            host = time.perf_counter()
            loss.item()
            steps_ms.append(1e3 * (time.perf_counter() - begin) / steps)
            hosts_ms.append(1e3 * (host - begin) / steps)
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, round(statistics.median(hosts_ms[1:]), 2))
        if dist.get_rank() == 0:
            own = steps_ms[1:]
            mean, median = statistics.mean(own), statistics.median(own)
            print(f"{name}: mean {mean:.2f}, median {median:.2f} ms a step; hosts {hosts}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=512, help="of one device")
    parser.add_argument("--workers", type=int, default=14, help="of one device")
    parser.add_argument("--passes", type=int, default=50, help="over batches that are given again")
    parser.add_argument("--hook", action="store_true")
    asked = parser.parse_args()
    training = Training(asked.batch, asked.workers, hook=asked.hook)
    loader, count = training.loader, asked.passes
    training.passes("real", 4, lambda: loader)
    kept = list(islice(loader, len(loader)))
    time.sleep(FILLED_S)
    there = [
        (
            pictures.to(training.device, memory_format=torch.channels_last),
            labels.to(training.device),
        )
        for pictures, labels in kept
    ]
    training.passes("replayed, workers idle", count, lambda: kept)
    training.passes("resident, workers idle", count, lambda: there)
    training.passes("real", 4, lambda: loader)
    loader._iterator._shutdown_workers()
    loader._iterator = None
    training.passes("replayed, no workers", count, lambda: kept)
    training.passes("resident, no workers", count, lambda: there)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
