"""Ranks that exchange in a way of their own: a part of an optimizer, a model."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, loop, model, script_task
from nfold.core.variant import Variant
from nfold.engines.interleaver import ActiveVariant
from nfold.instrument import trained_model
from nfold.instrument.hooks import patches as patches_module
from nfold.instrument.hooks.distributed_hooks import LOCAL_COLLECTIVES, CollectiveHooks
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.runtime_hooks import EventCounter


class Part(torch.optim.SGD):
    """Steps what another optimizer holds, which is a part of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"][:1], lr=0.1)

    def step(self, closure: Any = None) -> Any:
        del closure
        self.inner.step()


def test_nested_optimizer_step_counts_once() -> None:
    """An optimizer that shards its state steps one of its own on each rank."""

    def training() -> None:
        module = model()
        loop(DataLoader(dataset(), batch_size=8), module, Part(module.parameters()))

    found = instrumented(training, script_task(warmup_steps=5, steps=20))
    assert found.samples is not None
    assert found.profile.optimizers == ("Part",)
    assert found.profile.parameter_count == sum(p.numel() for p in model().parameters())
    assert len(found.samples.step_ms) == 20


class DTensor(nn.Parameter):
    """What a part of a tensor on a mesh of devices is called."""


def test_tensor_parallel_and_fsdp_are_distinguished() -> None:
    package = ModuleType(patches_module.TENSOR_PARALLEL_MODULE)
    vars(package)["parallelize_module"] = lambda module, **_: module
    patches_module.mark_parallelized(Patches(), package)
    whole, parts = model(), nn.Sequential(model())
    assert vars(package)["parallelize_module"](parts[0], mesh=None) is parts[0]
    held = [DTensor(torch.zeros(1))]
    wrappers: Any = SimpleNamespace(ddp=[], dp=[])
    kinds = [
        trained_model.detect_parallelism(wrappers, held, EventCounter(), (one,))
        for one in (whole, parts)
    ]
    assert kinds == ["fsdp", "tensor"]


@pytest.mark.parametrize(("imported", "kind"), [(True, "pipeline"), (False, "none")])
def test_pipeline_parallelism_is_detected(
    monkeypatch: pytest.MonkeyPatch, kind: str, *, imported: bool
) -> None:
    if imported:
        monkeypatch.setitem(
            sys.modules,
            trained_model.PIPELINING_MODULE,
            ModuleType(trained_model.PIPELINING_MODULE),
        )
    else:
        monkeypatch.delitem(sys.modules, trained_model.PIPELINING_MODULE, raising=False)
    tally = EventCounter()
    tally.enabled = True
    tally.count("collective", "isend", 8)
    wrappers: Any = SimpleNamespace(ddp=[], dp=[])
    assert trained_model.detect_parallelism(wrappers, [nn.Parameter(torch.zeros(1))], tally) == kind


@pytest.mark.parametrize("sent", ["all_to_all_single", "all_reduce"])
@pytest.mark.parametrize(("kind", "most"), [("ddp", 1), ("other", 2), ("fsdp", 0), ("tensor", 0)])
def test_sharded_tables_are_not_replicated(kind: Any, most: int, sent: str) -> None:
    dense, table = nn.Linear(1, 1, bias=False), nn.Parameter(torch.zeros(1))
    tally = EventCounter()
    tally.enabled = True
    tally.count("collective", sent, 8)
    wrappers: Any = SimpleNamespace(ddp=[dense], dp=[])
    held = [dense.weight, table]
    found = trained_model.replicated_parameters(kind, wrappers, held, tally)
    expected = held[:most] if sent != "all_reduce" or not most else held
    assert [id(one) for one in found] == [id(one) for one in expected]


def test_local_scatter_and_all_to_all_fill_the_output() -> None:
    """PyTorch's own collective takes tensors that are not contiguous."""
    output, rows = torch.zeros(3, 4).t(), torch.arange(12.0).view(4, 3)
    LOCAL_COLLECTIVES["all_to_all_single"](output, rows)
    assert torch.equal(output, rows)
    for size, expected in ((5, [0.0, 1.0, 2.0, 0.0, 1.0]), (2, [0.0, 1.0])):
        other = torch.zeros(size)
        LOCAL_COLLECTIVES["all_gather_into_tensor"](other, torch.arange(3.0))
        assert other.tolist() == expected


def _removed(tally: EventCounter) -> Patches:
    """Patches that count collectives and, since the first step is made, remove them."""
    patches = Patches()
    collectives = CollectiveHooks(ActiveVariant(script_task(Variant(exchange="none"))), tally)
    collectives.install(patches, patches)
    collectives.on_first_step()
    return patches


GATHER = ("all_gather_into_tensor", "all_gather_single")
SCATTER = ("reduce_scatter_tensor", "reduce_scatter_single")


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", GATHER + SCATTER)
def test_renamed_collective_counts_once_and_is_removed(name: str) -> None:
    """In a group of one rank the real one refuses tensors of unequal sizes."""
    if not hasattr(dist, name):
        pytest.skip(f"this version of PyTorch has no {name}")
    tally = EventCounter()
    tally.enabled = True
    shard, whole = torch.arange(2.0), torch.zeros(4)
    output, given = (whole, shard) if name in GATHER else (shard, whole)
    names = ("output_tensor", "input_tensor") if name in GATHER else ("output", "input")
    patches = _removed(tally)
    try:
        work = getattr(dist, name)(**dict(zip(names, (output, given), strict=True)), async_op=True)
        work.wait()
    finally:
        patches.undo()
    assert output.tolist() == ([0.0, 1.0, 0.0, 1.0] if name in GATHER else [0.0, 0.0])
    assert dict(tally.counts) == {name: 1}


@pytest.mark.usefixtures("group")
def test_module_that_imported_a_collective_is_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early: Any = ModuleType("early")
    early.all_reduce = usual = dist.all_reduce
    monkeypatch.setitem(sys.modules, "early", early)
    tally = EventCounter()
    tally.enabled = True
    patches = _removed(tally)
    try:
        early.all_reduce(torch.ones(2))
    finally:
        patches.undo()
    assert dict(tally.counts) == {"all_reduce": 1}
    assert early.all_reduce is usual
