"""Ranks that a script would start itself: this process is one of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import DistributedSampler, TensorDataset

from made import task
from nfold.instrument.hooks.distributed_hooks import install_spawn_hooks
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.rank_environment import single_rank_variables

WORLD = single_rank_variables(23456) | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
HOUR = timedelta(hours=1)
DATA = TensorDataset(torch.arange(20))


multiprocessing: Any = torch.multiprocessing
RANK = task(rank=1, world_size=4, strategy="ddp")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What reached ``init_process_group``, and where ranks were to meet then."""
    found: list[dict[str, Any]] = []

    def init(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        **more: Any,
    ) -> None:
        told = {"method": init_method, "timeout": timeout, "world": world_size, "rank": rank}
        found.append(told | more | {"backend": backend, "port": os.environ["MASTER_PORT"]})

    for name, value in WORLD.items():
        monkeypatch.setenv(name, value)
    for owner in (dist, distributed_c10d):
        monkeypatch.setattr(owner, "init_process_group", init)
    patches = Patches()
    install_spawn_hooks(RANK, patches)
    yield found
    patches.undo()


def test_spawned_function_runs_with_the_local_rank(joined: list[Any]) -> None:
    seen = []
    assert multiprocessing.spawn(lambda *told: seen.append(told), (2, "x"), nprocs=2) is None
    context = multiprocessing.spawn(lambda rank: seen.append(rank), nprocs=2, join=False)
    assert context.join()
    multiprocessing.start_processes(lambda rank: seen.append(rank), (), 2, True, False, "fork")
    assert seen == [(1, 2, "x"), 1, 1]
    assert not joined


def test_spawned_process_group_has_the_ranks_of_nfold(joined: list[Any]) -> None:
    init = dist.init_process_group

    def main(rank: int, world_size: int) -> None:
        os.environ["MASTER_PORT"] = "12355"
        init("gloo", "tcp://localhost:1", HOUR, world_size, rank, group_name="g")

    multiprocessing.spawn(main, (2,), nprocs=2)
    ours = {"method": None, "world": -1, "rank": -1, "port": "23456"}
    assert joined == [ours | {"backend": "gloo", "timeout": HOUR, "group_name": "g"}]


def test_spawned_sampler_has_the_ranks_of_nfold(joined: list[Any]) -> None:
    made: list[Any] = []
    multiprocessing.spawn(
        lambda rank: made.append(
            DistributedSampler(DATA, num_replicas=2, rank=rank, shuffle=False)
        ),
        nprocs=2,
    )
    assert list(made[0]) == [1, 5, 9, 13, 17]
    assert not joined


def test_nothing_changes_before_spawn(joined: list[Any]) -> None:
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", init_method="env://", world_size=2, rank=0)
    assert (joined[0]["method"], joined[0]["world"], joined[0]["rank"]) == ("env://", 2, 0)
    assert joined[0]["port"] == "12355"
    assert list(DistributedSampler(DATA, num_replicas=10, rank=9, shuffle=False)) == [9, 19]


def test_process_with_all_devices_may_spawn() -> None:
    before = multiprocessing.spawn
    patches = Patches()
    install_spawn_hooks(dataclasses.replace(RANK, plan=RANK.plan.edit(strategy="dp")), patches)
    assert multiprocessing.spawn is before
    install_spawn_hooks(RANK, patches)
    assert multiprocessing.spawn is not before
    patches.undo()
    assert multiprocessing.spawn is before
