"""``run.sum`` and ``run.mean`` on one rank, for numbers of any type."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from nfold.engines.torch.communication.data_parallel import sum_over_ranks, weighted_mean

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3), (True, 1), (np.int32(3), 3), (np.bool_(True), 1), (2**60 + 1, 2**60 + 1)],
)
def test_a_count_stays_whole(value: Any, expected: int) -> None:
    found = sum_over_ranks(value, CPU, 1)
    assert (found, type(found)) == (expected, int)


@pytest.mark.parametrize("value", [0.5, np.float16(0.5), np.float32(0.5), np.float64(0.5)])
def test_a_number_with_a_fraction_keeps_it(value: Any) -> None:
    assert sum_over_ranks(value, CPU, 1) == 0.5


def test_a_mean_of_no_samples_is_nan() -> None:
    assert weighted_mean(torch.tensor(3.0), 2, CPU, 1) == 3.0
    assert math.isnan(weighted_mean(math.nan, 0, CPU, 1))
