"""A static graph and the size of buckets: arguments of DDP in a script, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, loop, model, script_task
from made import machine, plan
from nfold.core.errors import UsageError
from nfold.core.script_profile import ScriptProfile
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.torch.variant_support import refusal

STATIC = Variant(ddp_static_graph=True)
SMALL = Variant(ddp_bucket_mb=1)
SCRIPT = Workload(name="train.py", script=("train.py",))
MIB = 1 << 20


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("variant", "static", "limit"), [(Variant(), False, 25), (STATIC, True, 25), (SMALL, False, 1)]
)
def test_a_wrapper_gets_the_arguments(variant: Variant, *, static: bool, limit: int) -> None:
    wrappers: list[DistributedDataParallel] = []

    def training() -> None:
        module = DistributedDataParallel(model())
        wrappers.append(module)
        loop(DataLoader(dataset(), batch_size=8), module, torch.optim.SGD(module.parameters()))

    assert instrumented(training, script_task(variant)).samples is not None
    assert wrappers[0].static_graph == static
    assert wrappers[0].bucket_bytes_cap == limit * MIB


@pytest.mark.parametrize("variant", [STATIC, SMALL])
@pytest.mark.parametrize(
    ("workload", "changes", "expected"),
    [
        (SCRIPT, {"strategy": "dp"}, "only DistributedDataParallel"),
        (SCRIPT, {"devices": 1, "strategy": "single"}, "exchanges no gradients"),
        (Workload(name="digits"), {}, "workloads"),
        (SCRIPT, {}, ""),
    ],
)
def test_a_refusal_has_a_reason(
    variant: Variant, workload: Workload, changes: dict[str, Any], expected: str
) -> None:
    requested = plan(
        machine(gpus=2), **{"device": "cuda", "devices": 2, "strategy": "ddp"} | changes
    )
    assert expected in (refusal(variant, workload, requested) or "")
    assert bool(refusal(variant, workload, requested)) == bool(expected)


def test_a_static_graph_is_refused_with_accumulated_batches_and_another_search() -> None:
    accumulated = plan(machine(gpus=2), device="cuda", devices=2, strategy="ddp", accumulate=2)
    assert "no_sync" in (refusal(STATIC, SCRIPT, accumulated) or "")
    assert refusal(SMALL, SCRIPT, accumulated) is None
    requested = plan(machine(gpus=2), device="cuda", devices=2, strategy="ddp")
    both = STATIC.merge(Variant(find_unused_parameters=False))
    assert "first step" in (refusal(both, SCRIPT, requested) or "")


def test_they_are_useful_under_ddp() -> None:
    buckets = (MIB, 20 * MIB)
    profile = ScriptProfile(parallel="ddp", bucket_bytes=buckets)
    assert Variant.ddp_static_graph.is_useful(profile)
    assert not Variant.ddp_static_graph.is_useful(ScriptProfile(parallel="ddp", accumulation=2))
    assert not Variant.ddp_static_graph.is_useful(ScriptProfile())
    assert Variant.ddp_bucket_mb.is_useful(profile)
    assert not Variant.ddp_bucket_mb.is_useful(ScriptProfile(parallel="ddp", bucket_bytes=(MIB,)))
    assert not Variant.ddp_bucket_mb.is_useful(ScriptProfile(bucket_bytes=buckets))


def test_a_bucket_size_is_at_least_1_and_changes_the_buckets() -> None:
    with pytest.raises(UsageError, match="ddp_bucket_mb 0"):
        Variant(ddp_bucket_mb=0)
    requested = plan(machine(gpus=2), device="cuda", devices=2, strategy="ddp")
    values = {
        buckets: Variant.ddp_bucket_mb.values_to_try(
            ScriptProfile(bucket_bytes=buckets), requested, 2
        )
        for buckets in ((20 * MIB,), (MIB, 20 * MIB))
    }
    assert list(values.values()) == [(1,), (100, 1)]
