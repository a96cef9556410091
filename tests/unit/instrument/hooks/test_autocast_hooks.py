"""The forward of a script's model under autocast to bf16."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from instrumented import (
    FEATURES,
    dataset,
    instrumented,
    loop,
    model,
    script_task,
    train_with_scaler,
)
from made import machine, plan
from nfold.core.errors import Unsupported
from nfold.core.script_profile import ScriptProfile
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.torch.variant_support import refusal
from nfold.instrument.hooks.autocast_hooks import AutocastHooks

ON = Variant(autocast_bf16=True)
SCRIPT = Workload(name="train.py", script=("train.py",))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


class Typed(nn.Module):
    """Notes the types of what it computes and of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 4)
        self.types: list[torch.dtype] = []

    def forward(self, samples: Tensor) -> dict[str, Tensor]:
        computed: Tensor = self.inner(samples)
        self.types.append(computed.dtype)
        return {"scores": computed, "samples": samples}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("variant", "computed"), [(Variant(), torch.float32), (ON, torch.bfloat16)]
)
def test_a_model_computes_in_bf16_and_returns_fp32(
    variant: Variant, computed: torch.dtype, *, wrapped: bool
) -> None:
    module = Typed()
    returned: list[torch.dtype] = []

    def training() -> None:
        called = DistributedDataParallel(module) if wrapped else module

        def scores(samples: Tensor) -> Tensor:
            found: Tensor = called(samples)["scores"]
            returned.append(found.dtype)
            return found

        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loop(DataLoader(dataset(), batch_size=8), cast(Any, scores), optimizer)

    observer = instrumented(training, script_task(variant))
    assert observer.samples is not None
    assert set(module.types) == {computed}
    assert set(returned) == {torch.float32}
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_a_copy_of_the_model_calls_its_own_forward() -> None:
    hooks, module = AutocastHooks(enabled=True), nn.Linear(2, 2)
    hooks.start()
    try:
        module(torch.ones(1, 2))
    finally:
        hooks.stop()
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert torch.equal(loaded(torch.ones(1, 2)), type(module).forward(module, torch.ones(1, 2)))
    other = copy.deepcopy(module)
    nn.init.zeros_(other.weight)
    nn.init.zeros_(other.bias)
    assert other(torch.ones(1, 2)).count_nonzero() == 0
    assert other(torch.ones(1, 2)).dtype == torch.float32
    assert module(torch.ones(1, 2)).count_nonzero() == 2
    assert not torch.is_autocast_enabled("cpu")


def test_a_forward_that_fails_leaves_autocast() -> None:
    hooks, module = AutocastHooks(enabled=True), nn.Linear(2, 2)
    hooks.start()
    try:
        with pytest.raises(RuntimeError):
            module(torch.ones(1, 3))
    finally:
        hooks.stop()
    assert not torch.is_autocast_enabled("cpu")


def train_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        module = model()
        loop(DataLoader(dataset(), batch_size=8), module, torch.optim.SGD(module.parameters()))


def train_in_eval_mode() -> None:
    module = model().eval()
    loop(DataLoader(dataset(), batch_size=8), module, torch.optim.SGD(module.parameters()))


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (train_under_autocast, "uses autocast"),
        (train_with_scaler, "uses GradScaler"),
        (train_in_eval_mode, "no module that trains"),
    ],
)
def test_scripts_that_are_refused(training: Any, expected: str) -> None:
    with pytest.raises(Unsupported, match=expected):
        instrumented(training, script_task(ON))


def test_it_is_for_fp32() -> None:
    requested = plan(machine(gpus=2), device="cuda", devices=2, strategy="ddp")
    half = requested.edit(precision="bf16")
    assert "bf16 already" in (refusal(ON, SCRIPT, half) or "")
    assert refusal(ON, SCRIPT, requested.edit(precision="fp32")) is None
    assert "precision" in (refusal(ON, Workload(name="digits"), requested) or "")
    profile = ScriptProfile(precision="fp32")
    assert Variant.autocast_bf16.is_useful(profile)
    assert not Variant.autocast_bf16.is_useful(dataclasses.replace(profile, precision="fp16"))
    assert not Variant.autocast_bf16.is_useful(dataclasses.replace(profile, autocast="bf16"))
