"""conv2d on real GPUs: every part is there, and the results are scipy's."""

from __future__ import annotations

import pytest
import torch

from nfold.plan import Plan
from nfold.workloads.conv2d.rank import ConvResult, ConvTask
from nfold.workloads.conv2d.torch import run_parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def run(devices: int, precision: str, layout: str, **parameters: int) -> ConvResult:
    plan = Plan(
        device="cuda",
        devices=devices,
        cores_per_device=1,
        strategy="single" if devices == 1 else "dp",
        batch=50,
        precision=precision,
        layout=layout,
        input="loader",
        workers=0,
        augment="cpu",
        step="eager",
        steps=4,
        warmup_steps=2,
    )
    defaults = {"size": 40, "channels": 1, "filter": 3, "copy_only": 0}
    return run_parts(
        ConvTask(
            parameters={**defaults, **parameters},
            plan=plan,
            rank=0,
            world_size=1,
            devices=[torch.device("cuda", index) for index in range(devices)],
            barrier=lambda: None,
            beat=lambda done, total: None,
        )
    )


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
@pytest.mark.parametrize("width", [3, 5, 10])
@pytest.mark.parametrize("channels", [1, 10])
def test_every_form_agrees_with_scipy(
    precision: str, layout: str, width: int, channels: int
) -> None:
    result = run(1, precision, layout, filter=width, channels=channels)
    assert len(result.windows) == 4


def test_the_parts_of_a_gpu() -> None:
    result = run(1, "fp32", "channels_first")
    assert [part.name for part in result.parts if not part.baseline] == [
        "first call",
        "copy to device, pageable",
        "copy to device, pinned",
        "copy from device, pageable",
        "copy from device, pinned",
        "copy only, pageable",
        "copy only, pinned",
        "end to end, pageable",
        "end to end, pinned",
        "convolution, cold cache",
        "convolution, warm cache",
        "resident loop",
    ]
    assert all(min(part.seconds) > 0 for part in result.parts)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_process_drives_two_gpus() -> None:
    assert run(2, "fp32", "channels_first").windows[0].samples == 50
