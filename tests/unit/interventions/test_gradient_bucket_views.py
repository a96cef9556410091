"""Gradients that are views of DDP's buckets, in a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, loop, model, script_task
from made import machine, plan
from nfold.core.errors import Unsupported
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.torch.variant_support import refusal

ON = Variant(gradient_as_bucket_view=True)
SCRIPT = Workload(name="train.py", script=("train.py",))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def _train(module: nn.Module) -> None:
    loop(DataLoader(dataset(), batch_size=8), module, torch.optim.SGD(module.parameters()))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("variant", "views"), [(Variant(), False), (ON, True)])
def test_a_wrapper_gets_the_argument(variant: Variant, *, views: bool) -> None:
    wrappers: list[DistributedDataParallel] = []

    def training() -> None:
        wrappers.append(DistributedDataParallel(model()))
        _train(wrappers[0])

    assert instrumented(training, script_task(variant)).samples is not None
    assert wrappers[0].gradient_as_bucket_view == views


def test_a_script_without_a_wrapper_is_refused() -> None:
    with pytest.raises(Unsupported, match="makes no DistributedDataParallel"):
        instrumented(lambda: _train(model()), script_task(ON))


@pytest.mark.parametrize(
    ("workload", "strategy", "expected"),
    [
        (SCRIPT, "dp", "only DistributedDataParallel"),
        (Workload(name="digits"), "ddp", "already"),
        (SCRIPT, "ddp", ""),
    ],
)
def test_a_refusal_has_a_reason(workload: Workload, strategy: str, expected: str) -> None:
    requested = plan(machine(gpus=2), device="cuda", devices=2, strategy=strategy)
    assert expected in (refusal(ON, workload, requested) or "")
    assert bool(refusal(ON, workload, requested)) == bool(expected)
