"""The steps of an epoch as calls: every sample once, in order, whatever a call's length."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import made
from nfold.engines.keras.backend import group_calls
from nfold.engines.keras.input import prefetch_one
from nfold.engines.sampling import EpochSampler, sample_hash, step_limit


def _stream(samples: int, **changes: Any) -> EpochSampler:
    plan = made.plan(**changes)
    return EpochSampler(samples, plan, rank=0, ranks=1, limit=step_limit(plan))


@pytest.mark.parametrize("steps_per_call", [1, 2, 3, 7])
@pytest.mark.parametrize("samples", [5, 16, 40, 100])
def test_every_sample_is_in_one_call_in_the_order_of_the_epoch(
    samples: int, steps_per_call: int
) -> None:
    stream = _stream(samples)
    order = stream.epoch_order(2)
    found = list(group_calls(order, stream.slices, steps_per_call))
    assert np.array_equal(np.concatenate([group.ids.reshape(-1) for group in found]), order)
    assert sum(len(group.ids) * group.steps_per_call for group in found) == stream.steps_per_epoch
    assert all(group.steps_per_call in (1, steps_per_call) for group in found)
    hashed = sum(number for group in found for number in group.sample_hashes())
    assert hashed % 2**64 == sample_hash(order)


def test_a_run_in_steps_ends_in_the_middle_of_an_epoch() -> None:
    stream = _stream(40, steps=6, warmup_steps=1)
    passes = list(stream.epochs())
    assert [(epoch, len(cuts)) for epoch, cuts in passes] == [(0, 3), (1, 3), (2, 1)]
    assert len(stream) == 7
    assert list(group_calls(stream.epoch_order(0), [], 2)) == []


def test_one_job_is_ahead_and_all_come_in_order() -> None:
    begun: list[int] = []

    def job(number: int) -> int:
        begun.append(number)
        return number

    with ThreadPoolExecutor(1) as thread:
        results = prefetch_one((partial(job, number) for number in range(4)), thread)
        assert next(results) == 0
        thread.submit(int).result()
        assert begun == [0, 1]
        assert list(results) == [1, 2, 3]
