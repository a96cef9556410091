"""Cudnn.benchmark in a script, and where it is refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, loop, model, script_task
from made import machine, plan
from nfold.core.script_profile import Parallelism, ScriptProfile
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.torch.variant_support import refusal

ON = Variant(cudnn_benchmark=True)
HOST = machine(gpus=2, cores=2)
SCRIPT = Workload(name="train.py", script=("train.py",))


@pytest.mark.parametrize(("variant", "expected"), [(Variant(), {False}), (ON, {True})])
def test_a_script_trains_with_it(variant: Variant, expected: set[bool]) -> None:
    settings: list[bool] = []

    def training() -> None:
        module = model()
        module.register_forward_hook(lambda *_: settings.append(torch.backends.cudnn.benchmark))
        torch.backends.cudnn.benchmark = False
        loop(DataLoader(dataset(), batch_size=8), module, torch.optim.SGD(module.parameters()))

    assert instrumented(training, script_task(variant)).samples is not None
    assert set(settings[1:]) == expected
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("workload", "changes", "expected"),
    [
        (SCRIPT, {"device": "cpu"}, "GPUs only"),
        (Workload(name="digits"), {}, "already"),
        (SCRIPT, {}, ""),
    ],
)
def test_a_refusal_has_a_reason(workload: Workload, changes: dict[str, str], expected: str) -> None:
    requested = plan(HOST, **{"device": "cuda", "devices": 2, "strategy": "ddp", **changes})
    assert expected in (refusal(ON, workload, requested) or "")
    assert bool(refusal(ON, workload, requested)) == bool(expected)


@pytest.mark.parametrize(("parallel", "expected"), [("none", True), ("dp", False)])
def test_searches_in_new_threads_are_useless(parallel: Parallelism, *, expected: bool) -> None:
    profile = ScriptProfile(convolutions=3, parallel=parallel)
    assert Variant.cudnn_benchmark.is_useful(profile) == expected
    assert Variant.compiled.is_useful(profile) == expected
