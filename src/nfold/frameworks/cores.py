"""CPU devices: equal, disjoint shares of the host's cores. Imports no framework."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from nfold.plan import Plan


@contextmanager
def pin_to_cores(plan: Plan, local_rank: int, devices: int = 1) -> Iterator[None]:
    """Pin this process to the cores of its CPU device, or ``devices`` of them; on GPUs, do not.

    The share is the same in every cell of a grid, so one CPU device next to two is one share
    next to two shares, not all cores next to all cores. Enter before importing the framework,
    whose thread pools take their size from OMP_NUM_THREADS and from the cores they may use.
    """
    if plan.device != "cpu" or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    share = devices * (plan.cores_per_device or 1)
    os.environ["OMP_NUM_THREADS"] = str(share)
    os.sched_setaffinity(0, core_share(sorted(before), share, local_rank))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def core_share(cores: list[int], share: int, index: int) -> list[int]:
    """The ``index``-th group of ``share`` cores."""
    found = cores[index * share : (index + 1) * share]
    if len(found) < share:
        raise ValueError(f"CPU device {index} of {share} cores does not fit into {cores}")
    return found
