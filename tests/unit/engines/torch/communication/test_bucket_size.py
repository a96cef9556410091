"""Bucket sizes from a linear fit of all-reduce times."""

from __future__ import annotations

import pytest

from nfold.engines.torch.communication.data_parallel import (
    MAX_BUCKET_BYTES,
    MIN_BUCKET_BYTES,
    PROBED_BYTES,
    choose_bucket_bytes,
)


def _line(latency: float, bytes_per_s: float) -> list[float]:
    return [latency + size / bytes_per_s for size in PROBED_BYTES]


def test_latency_is_a_tenth_of_a_bucket_s_time() -> None:
    """22 us and 200 GB/s, as between four H200s: 9 x 22e-6 x 200e9 bytes."""
    assert choose_bucket_bytes(PROBED_BYTES, _line(22e-6, 200e9)) == pytest.approx(39.6e6, rel=1e-3)


@pytest.mark.parametrize(
    ("latency", "bytes_per_s", "expected"),
    [(1e-7, 1e9, MIN_BUCKET_BYTES), (1.0, 1e9, MAX_BUCKET_BYTES), (-1e-3, 1e9, MIN_BUCKET_BYTES)],
)
def test_sizes_stay_in_bounds(latency: float, bytes_per_s: float, expected: int) -> None:
    assert choose_bucket_bytes(PROBED_BYTES, _line(latency, bytes_per_s)) == expected


def test_times_that_do_not_grow_give_the_largest() -> None:
    assert choose_bucket_bytes(PROBED_BYTES, [3e-3, 2e-3, 1e-3]) == MAX_BUCKET_BYTES
