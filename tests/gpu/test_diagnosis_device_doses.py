"""Doses of device time keep a GPU busy, not the host."""

from __future__ import annotations

from typing import Any

import faults
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def _device_ms(dose_ms: float, device: torch.device) -> float:
    cuda: Any = torch.cuda
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    faults.busy(dose_ms, device)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


@pytest.mark.alone
def test_a_dose_is_time_of_the_device() -> None:
    device = torch.device("cuda", 0)
    _device_ms(20.0, device)
    assert _device_ms(20.0, device) / _device_ms(5.0, device) == pytest.approx(4, rel=0.1)
    assert _device_ms(20.0, device) == pytest.approx(20.0, rel=0.2)


def test_a_pageable_copy_takes_its_dose_in_proportion() -> None:
    device = torch.device("cuda", 0)
    small, large = (faults._luggage(dose, device).numel() for dose in (1.0, 4.0))
    assert large / small == pytest.approx(4, rel=0.001)
    assert faults.moved(torch.ones(3, device=device), device).is_cuda
