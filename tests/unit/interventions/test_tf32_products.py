"""TF32 in a script and in a workload, switched between steps, and where it is refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, loop, model, script_task
from made import machine, plan
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.torch.torch_settings import TorchSettings
from nfold.engines.torch.variant_support import refusal, switchable_fields

ON = Variant(tf32=True)
HOST = machine(gpus=2, cores=2)
SCRIPT = Workload(name="train.py", script=("train.py",))


def test_a_script_trains_with_it() -> None:
    settings: list[str] = []

    def training() -> None:
        module = model()
        module.register_forward_hook(
            lambda *_: settings.append(torch.get_float32_matmul_precision())
        )
        loop(DataLoader(dataset(), batch_size=8), module, torch.optim.SGD(module.parameters()))

    assert instrumented(training, script_task(ON)).samples is not None
    assert set(settings) == {"high"}
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_rank_switches_it() -> None:
    settings = TorchSettings((Variant(), ON))
    settings.apply(ON)
    assert torch.get_float32_matmul_precision() == "high"
    settings.apply(Variant())
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device": "cpu"}, "no TF32"),
        ({"precision": "bf16"}, "no fp32 products"),
        ({"precision": "fp32"}, ""),
    ],
)
def test_a_refusal_has_a_reason(changes: dict[str, str], expected: str) -> None:
    requested = plan(HOST, **{"device": "cuda", "devices": 2, "strategy": "ddp", **changes})
    for workload in (SCRIPT, Workload(name="digits")):
        assert expected in (refusal(ON, workload, requested) or "")
        assert bool(refusal(ON, workload, requested)) == bool(expected)


def test_a_captured_step_cannot_switch_it() -> None:
    for step, switches in (("eager", True), ("captured", False)):
        requested = plan(HOST, device="cuda", step=step, steps=8)
        assert ("tf32" in switchable_fields(Workload(name="digits"), requested)) == switches
