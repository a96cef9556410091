"""Doses of device time keep a GPU busy, not the host."""

from __future__ import annotations

import json
import time
from typing import Any

import busy
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
    busy.busy(dose_ms, device)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


@pytest.mark.alone
def test_a_dose_is_time_of_the_device() -> None:
    device = torch.device("cuda", 0)
    _device_ms(20.0, device)
    assert _device_ms(20.0, device) / _device_ms(5.0, device) == pytest.approx(4, rel=0.1)
    assert _device_ms(20.0, device) == pytest.approx(20.0, rel=0.2)


@pytest.mark.alone
def test_pageable_copies_take_their_dose_after_what_the_device_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAULTS", json.dumps({"copies": 5.0}))
    device = torch.device("cuda", 0)
    _carried_ms(device, busy_ms=0.0)
    assert _carried_ms(device, busy_ms=0.0) == pytest.approx(5.0, rel=0.3)
    assert _carried_ms(device, busy_ms=20.0) == pytest.approx(25.0, rel=0.2)
    assert faults.moved(torch.ones(3, device=device), device).is_cuda


def _carried_ms(device: torch.device, busy_ms: float) -> float:
    """Of a batch with its dose, on a device that has something else to do first."""
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    busy.busy(busy_ms, device)
    faults.moved(torch.ones(3), device)
    torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) * 1e3
