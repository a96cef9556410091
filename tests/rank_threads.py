"""Ranks that are threads of one process, which exchange samples as processes would."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from nfold.engines.torch.input import device_dataset

Result = TypeVar("Result")


class Threads:
    """An all-to-all between threads, each of which is a rank."""

    def __init__(self, ranks: int) -> None:
        self.here = local()
        self._barrier = Barrier(ranks, timeout=30)
        self._outgoing: list[tuple[Tensor, ...]] = [()] * ranks

    def exchanged(self, own: Tensor, receive_counts: list[int], send_counts: list[int]) -> Tensor:
        """What ``sharded.exchanged`` gives."""
        rank = self.here.rank
        assert len(own) == sum(send_counts)
        self._outgoing[rank] = torch.split(own, send_counts)
        self._barrier.wait()
        incoming = [parts[rank] for parts in self._outgoing]
        assert [len(part) for part in incoming] == receive_counts
        self._barrier.wait()
        return torch.cat(incoming)


def on_threads(
    patch: pytest.MonkeyPatch, ranks: int, work: Callable[[int], Result]
) -> list[Result]:
    """What ``work`` returns for each rank, all at once."""
    threads = Threads(ranks)
    patch.setattr(device_dataset, "all_to_all_samples", threads.exchanged)

    def one(rank: int) -> Result:
        threads.here.rank = rank
        return work(rank)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))
