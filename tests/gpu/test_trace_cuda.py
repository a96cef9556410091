"""A profile of some steps on a GPU: transposes and busy time."""

from __future__ import annotations

import pytest
import torch

from nfold.core.script_profile import TraceSummary
from nfold.instrument.profilers import TRACED_STEPS, ProfilerTrace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PERMUTES = 5


def _traced(permutes: int) -> TraceSummary:
    images = torch.zeros(64, 64, 64, 64, device="cuda")
    tracing = ProfilerTrace(enabled=True)
    tracing.begin(cuda=True)
    over = False
    while not over:
        for _ in range(permutes):
            images.permute(0, 2, 3, 1).contiguous()
        images.add(1)
        torch.cuda.synchronize()
        over = tracing.on_step()
    found = tracing.take_summary()
    assert found is not None
    return found


def test_copies_into_another_order_are_time_of_the_device() -> None:
    """134 MB are read and written in each: at least 25 microseconds at 5 TB/s."""
    none, some = _traced(0), _traced(PERMUTES)
    assert none.steps == some.steps == TRACED_STEPS
    assert none.layout_copy_ms == (0.0,) * TRACED_STEPS
    assert min(some.layout_copy_ms) > PERMUTES * 0.025
    assert (round(none.launches_per_step), round(some.launches_per_step)) == (1, 1 + PERMUTES)
    assert none.device_busy_ms is not None
    assert some.device_busy_ms is not None
    assert some.device_busy_ms - none.device_busy_ms == pytest.approx(
        sum(some.layout_copy_ms) / TRACED_STEPS, rel=0.2
    )
