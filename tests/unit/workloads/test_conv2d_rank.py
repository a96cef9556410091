"""What one rank's task knows about itself, and its first call."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from nfold.plan import Plan
from nfold.workloads.conv2d.rank import ConvTask, first_call


def task(rank: int = 1, cores_per_device: int = 1) -> ConvTask[str]:
    return ConvTask(
        parameters={"size": 4, "channels": 1, "filter": 3, "copy_only": 0},
        plan=Plan(batch=7, devices=3, cores_per_device=cores_per_device),
        rank=rank,
        world_size=3,
        devices=["one"],
        barrier=lambda: None,
        beat=lambda done, total: None,
    )


def test_a_rank_knows_its_images() -> None:
    assert [task(rank).device_images for rank in range(3)] == [
        [range(2)],
        [range(2, 4)],
        [range(4, 7)],
    ]


def test_the_cores_are_the_plans_but_never_more_than_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    assert task(cores_per_device=1).cores == 3
    assert task(cores_per_device=2).cores == 4


def test_the_first_call_has_the_beginning_in_it() -> None:
    now = [0.0]

    def spend(seconds: float) -> float:
        now[0] += seconds
        return seconds

    def begin() -> SimpleNamespace:
        spend(2.0)
        problem = SimpleNamespace(images=7)
        return SimpleNamespace(
            problem=problem, one_way_bytes=10, end_to_end=lambda host: spend(host)
        )

    _, part = first_call(begin, 0.5, "why", lambda: now[0])  # type: ignore[arg-type, type-var]
    assert (part.name, part.seconds, part.images, part.bytes) == ("first call", (2.5,), 7, 20)
