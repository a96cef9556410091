"""What devices of TensorFlow and JAX share, on a library of values that is NumPy itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from nfold.core.errors import Mismatch
from nfold.core.plan import Plan
from nfold.workloads.conv2d.array_device import (
    ArrayDevice,
    ArrayKernelTimer,
    NumpyHostBuffers,
    run_devices,
    same_padding,
)
from nfold.workloads.conv2d.device import KernelTimer
from nfold.workloads.conv2d.problem import Array, ConvTask
from nfold.workloads.conv2d.process import ConvResult

PLAN = Plan(
    framework="tensorflow",
    device="cpu",
    devices=2,
    cores_per_device=1,
    strategy="mirrored",
    batch=5,
    precision="fp32",
    layout="channels_last",
    input="loader",
    workers=0,
    augment="cpu",
    step="graph",
    steps=2,
    warmup_steps=0,
)


@pytest.fixture(autouse=True)
def _small_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelTimer, "eviction_bytes", 1024)


class NumpyDevice(ArrayDevice):
    """Correlates by shifted sums, in either layout."""

    def create_input(self, images: Array) -> Array:
        return images.copy()

    def to_host(self, value: Any) -> Array:
        found: Array = value
        return found

    def convolve(self, images: Any, filters: Any) -> Any:
        last = self.plan.layout == "channels_last"
        x = images if last else images.transpose(0, 2, 3, 1)
        width, size = len(filters), x.shape[1]
        padded = np.pad(x, [(0, 0), same_padding(width), same_padding(width), (0, 0)])
        found = sum(
            padded[:, i : i + size, j : j + size] @ filters[i, j]
            for i in range(width)
            for j in range(width)
        )
        return found if last else np.transpose(found, (0, 3, 1, 2))

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def wait(self, values: Sequence[Any]) -> None:
        assert all(isinstance(value, np.ndarray) for value in values)


def task(plan: Plan = PLAN, **parameters: int) -> ConvTask:
    return ConvTask(
        parameters={"size": 9, "channels": 2, "filter": 4, "copy_only": 0, **parameters},
        plan=plan,
        rank=0,
        world_size=1,
        devices=range(plan.devices or 1),
        barrier=lambda: None,
        beat=lambda done, planned: None,
    )


def run(
    plan: Plan = PLAN, device_class: type[NumpyDevice] = NumpyDevice, **parameters: int
) -> ConvResult:
    ticks = iter(range(10**6))
    return run_devices(
        task(plan, **parameters), device_class, lambda: 77, lambda: float(next(ticks))
    )


@pytest.mark.parametrize("layout", ["channels_last", "channels_first"])
@pytest.mark.parametrize("width", [3, 4])
def test_uneven_shares_are_convolved_as_scipy_does(layout: str, width: int) -> None:
    result = run(PLAN.edit(layout=layout), filter=width)
    parts = {part.name: part for part in result.parts if not part.baseline}
    one_way = 5 * 2 * 9 * 9 * 4
    assert parts["copy to device"].bytes == parts["copy from device"].bytes == one_way
    assert parts["end to end"].bytes == 2 * one_way
    assert {part.images for part in parts.values()} == {5}
    assert [window.samples for window in result.windows] == [5, 5]
    assert result.peak_memory_bytes == 77


def test_on_gpus_the_parts_have_the_names_of_pageable_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nfold.workloads.conv2d.array_device.GPU_EVICTION_BYTES", 1024)
    result = run(PLAN.edit(device="cuda"))
    names = [part.name for part in result.parts if not part.baseline]
    assert names[1:5] == [
        "copy to device, pageable",
        "copy from device, pageable",
        "copy only, pageable",
        "end to end, pageable",
    ]
    resident = next(part for part in result.parts if part.name == "resident loop")
    assert resident.note.startswith("mean of a chain of 50,")


def test_device_that_writes_other_results_is_a_mismatch() -> None:
    class Misplaced(NumpyDevice):
        def download(self, host: NumpyHostBuffers) -> None:
            host.results[:] = self.to_host(self.result)[:1]

    with pytest.raises(Mismatch, match="differs from scipy's"):
        run(device_class=Misplaced)


def test_a_kernel_is_timed_from_idle_to_idle() -> None:
    log: list[str] = []

    class Logged(NumpyDevice):
        def wait(self, values: Sequence[Any]) -> None:
            log.append("wait")

        def compute(self) -> None:
            super().compute()
            log.append("compute")

    host = NumpyHostBuffers.of(np.ones((5, 2, 9, 9), np.float32), "channels_last")
    ArrayKernelTimer(Logged(task(), 0, host)).warm()
    assert log == ["wait", "compute", "wait", "compute", "wait"]
