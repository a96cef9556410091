"""What a profiler tells of some steps: copies into another order, launches, a busy device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, loop, model, script_task, usual
from nfold.core.script_profile import TraceSummary
from nfold.core.variant import Variant
from nfold.engines.base import Phase
from nfold.instrument import profilers
from nfold.instrument.profilers import STEP_END_MARK, TRACED_STEPS, summarize

IMAGES, LAST, FIRST = [4, 8, 2, 2], [32, 1, 16, 8], [32, 4, 2, 1]


def _mark(at: float) -> dict[str, Any]:
    return {"name": STEP_END_MARK, "cat": "user_annotation", "ts": at, "dur": 1}


def _copy(number: int, at: float, strides: list[list[int]]) -> dict[str, Any]:
    told = {"External id": number, "Input Dims": [IMAGES, IMAGES, []], "Input Strides": strides}
    return {"name": "aten::copy_", "cat": "cpu_op", "ts": at, "dur": 5, "args": told}


def _kernel(number: int, at: float, taken: float, name: str = "elementwise") -> dict[str, Any]:
    told = {"External id": number, "device": 0}
    return {"name": name, "cat": "kernel", "ts": at, "dur": taken, "args": told}


def test_layout_copies_count_in_the_step_that_launched_them() -> None:
    events = [
        *map(_mark, (0, 100, 200, 300)),
        _copy(1, 10, [LAST, FIRST]),
        _kernel(1, 20, 7000),
        _copy(2, 110, [LAST, FIRST]),
        _kernel(2, 250, 3000),
        _copy(3, 120, [FIRST, FIRST]),
        _kernel(3, 4000, 500),
        _kernel(4, 4600, 2000, "cudnn::ops::nchwToNhwcKernel"),
        _copy(5, 210, [FIRST, [0, 0, 0, 0]]),
        _kernel(5, 7000, 100),
        _kernel(6, 7050, 150, "ncclDevKernel_AllReduce"),
    ]
    events += [{"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": 220, "dur": 3}]
    events[10]["args"]["External id"] = 3
    found = summarize(events, cuda=True)
    assert found is not None
    assert found.steps == 2
    assert found.layout_copy_ms == (3.0, 0.0)
    assert found.cudnn_transpose_ms == 2.0 / 2
    assert found.launches_per_step == 4 / 2
    assert found.device_busy_ms == pytest.approx((3000 + 500 + 2000 + 100) / 1e3 / 2)


def test_layout_copies_include_the_launch_gap() -> None:
    """Kernels that were launched in time are 1.5 µs apart; a late one is 100 µs."""
    kernels = [_kernel(9, 500 + 21.5 * place, 20) for place in range(5)]
    events = [
        *map(_mark, (0, 100, 200)),
        *kernels,
        _kernel(9, 800, 20),
        _copy(1, 110, [LAST, FIRST]),
        _kernel(1, 1000, 40),
    ]
    found = summarize(events, cuda=True)
    assert found is not None
    assert sum(found.layout_copy_ms) == pytest.approx(0.0415)


def test_cpu_trace_has_layout_copies_and_no_device_time() -> None:
    copies = _copy(1, 110, [FIRST, LAST]), _copy(2, 20, [FIRST, LAST])
    found = summarize([*map(_mark, (0, 100, 200)), *copies], cuda=False)
    assert found is not None
    assert found.layout_copy_ms == (0.005,)
    assert (found.launches_per_step, found.device_busy_ms) == (0, None)
    assert summarize([_mark(0), _mark(1)], cuda=False) is None
    assert summarize([*map(_mark, (0, 100, 200)), *copies], cuda=True) is None


def test_copies_inside_convolutions_are_separate() -> None:
    inside = {"name": "aten::convolution_backward", "cat": "cpu_op", "ts": 105, "dur": 40}
    inner = {"name": "aten::mkldnn_convolution", "cat": "cpu_op", "ts": 106, "dur": 2}
    copies = [_copy(n, at, [FIRST, LAST]) for n, at in enumerate((110, 140, 146, 190), start=1)]
    more = [{**one, "args": {"External id": n}} for n, one in enumerate((inside, inner), start=8)]
    found = summarize([*map(_mark, (0, 100, 200)), *copies, *more], cuda=False)
    assert found is not None
    assert found.layout_copy_ms == (0.02,)
    assert found.operator_layout_copy_ms == (0.01,)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("aten::upsample_nearest2d", 0.005),
        ("autograd::engine::evaluate_function: MaxPool2DWithIndicesBackward0", 0.005),
        ("aten::native_batch_norm", 0.005),
        ("aten::contiguous", 0.0),
        ("aten::matmul", 0.0),
    ],
)
def test_copies_inside_image_operators_are_separate(name: str, inside: float) -> None:
    operator = {"name": name, "cat": "cpu_op", "ts": 105, "dur": 40, "args": {"External id": 9}}
    found = summarize(
        [*map(_mark, (0, 100, 200)), _copy(1, 110, [FIRST, LAST]), operator], cuda=False
    )
    assert found is not None
    assert (found.layout_copy_ms, found.operator_layout_copy_ms) == ((0.005,), (inside,))


class Permuting(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.inner, self.times = model(), times
        self.images = torch.zeros(32, 64, 16, 16)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            self.images.permute(0, 2, 3, 1).contiguous()
            self.images.clone()
        result: torch.Tensor = self.inner(given)
        return result


def test_traced_steps_follow_timed_steps() -> None:
    none, some = _traced(0), _traced(4)
    assert none.steps == some.steps == TRACED_STEPS
    assert none.layout_copy_ms == (0.0,) * TRACED_STEPS
    assert min(some.layout_copy_ms) > 0


def _traced(times: int) -> TraceSummary:
    def training() -> None:
        module = Permuting(times)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loop(DataLoader(dataset(), batch_size=8), module, optimizer)

    found = instrumented(training, script_task(Variant(profiler_steps=True), steps=12))
    assert found.samples is not None
    assert len(found.samples.step_ms) == 12
    assert found.samples.parameter_checksum
    assert found.profile.trace is not None
    return found.profile.trace


def test_large_trace_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profilers, "MAX_TRACE_BYTES", 1000)
    found = instrumented(usual, script_task(Variant(profiler_steps=True), steps=12))
    assert found.samples is not None
    assert found.profile.trace is None
    assert found.phases[-1] == Phase.FIRST_STEP


def test_script_that_ends_early_is_not_traced() -> None:
    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loop(DataLoader(dataset(64), batch_size=8), module, optimizer, epochs=2)

    found = instrumented(training, script_task(Variant(profiler_steps=True), steps=100))
    assert found.profile.trace is None


def test_script_with_its_own_profiler_is_not_traced() -> None:
    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with torch.profiler.profile():
            loop(DataLoader(dataset(64), batch_size=8), module, optimizer)

    found = instrumented(training, script_task(Variant(profiler_steps=True), steps=12))
    assert found.samples is not None
    assert len(found.samples.step_ms) == 12
    assert found.profile.trace is None
