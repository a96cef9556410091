"""Private names of PyTorch: each exists in the installed version, and none is used elsewhere."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import profiler
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.fsdp import _flat_param
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import dataloader

from nfold.instrument import torch_private
from test_architecture import SOURCE

PYTHON = {"_exit", "_getframe", "_current_frames", "_shutdown", "_run_exitfuncs", "_fields"}
"""Private, but documented or not of PyTorch."""
LAUNCH = {
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter"),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter"),
    ("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "_matches_machine_hostname"),
    ("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "TCPStore"),
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "DynamicRendezvousHandler"),
    ("torch.cuda", "_is_in_bad_fork"),
}
"""Names of modules that must not import torch, and those that the agent replaces."""


def private_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and not node.attr.startswith("__"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            parts = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part) for part in parts if part.startswith("_"))


@pytest.mark.parametrize("layer", ["engines", "instrument", "launch", "workloads"])
def test_private_names_are_in_one_module(layer: str) -> None:
    known = PYTHON | {name for _, name in LAUNCH} | {"_shutdown_workers", "_key", "_popen"}
    found = [
        f"{file}:{line}: {name}"
        for file in sorted((SOURCE / layer).rglob("*.py"))
        if file.name != "torch_private.py"
        for line, name in private_attributes(ast.parse(file.read_text()))
        if name not in known
    ]
    assert found == []


@pytest.mark.parametrize(("module", "name"), sorted(LAUNCH))
def test_names_of_the_launcher_exist(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch_private.BaseDataLoaderIter, torch_private.NEXT_INDEX),
        (torch_private.BaseDataLoaderIter, "__next__"),
        *((fetcher, "fetch") for fetcher in torch_private.FETCHERS),
        (DistributedDataParallel, torch_private.REGISTER_BUILTIN_HOOK),
        (DistributedDataParallel, torch_private.SYNC_BUFFERS),
        (dynamic_rendezvous.DynamicRendezvousHandler, "_create_tcp_store_server"),
        (SubprocessHandler, "_popen"),
        (
            dataloader._MultiProcessingDataLoaderIter,
            "_shutdown_workers",
        ),
    ],
    ids=str,
)
def test_patched_and_called_methods_exist(owner: Any, name: str) -> None:
    assert callable(getattr(owner, name))


def test_tensors() -> None:
    whole = torch.zeros(2, 2)
    assert torch_private.base(whole) is None
    assert torch_private.base(whole[0]) is whole
    before = torch_private.version(whole)
    torch_private.foreach_add([whole], [torch.ones(2, 2)])
    torch_private.foreach_mul([whole], 3.0)
    assert torch_private.version(whole) > before
    torch_private.foreach_copy([whole[0]], [torch.zeros(2)])
    assert whole.tolist() == [[0.0, 0.0], [3.0, 3.0]]
    assert torch_private.coo_bytes(whole.to_sparse()) == 2 * 4 + 2 * 2 * 8
    assert torch_private.new_shared_storage(3).nbytes() == 3
    rows: list[torch.Tensor] = []
    torch.func.vmap(lambda row: rows.append(row) or row)(whole)  # type: ignore[func-returns-value]
    assert torch_private.is_functorch_wrapped(rows[0])
    assert not torch_private.is_functorch_wrapped(whole)


def test_modules() -> None:
    layer = nn.BatchNorm1d(2)
    assert isinstance(layer, torch_private.BatchNorm)
    with pytest.raises(ValueError, match="2D or 3D"):
        torch_private.check_input_dimensions(layer, torch.zeros(2))
    assert not torch_private.is_compiled(layer)
    layer.compile(backend="eager")
    assert torch_private.is_compiled(layer)
    assert "_is_flat_param" in inspect.getsource(_flat_param)  # for is_flat_parameter


def test_backward_callback_runs_at_the_end_of_backward() -> None:
    order: list[str] = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(lambda _: order.append("leaf"))  # type: ignore[no-untyped-call]
    loss = leaf * 2
    loss.register_hook(  # type: ignore[no-untyped-call]
        lambda _: torch_private.queue_backward_callback(lambda: order.append("end"))
    )
    loss.backward()  # type: ignore[no-untyped-call]
    assert order == ["leaf", "end"]


def test_profiler() -> None:
    assert not torch_private.is_profiling()
    with profiler.profile():
        assert torch_private.is_profiling()


def test_process_groups(tmp_path: Any) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        ddp(torch.ones(1, 2)).sum().backward()
        assert "bucket_sizes" in torch_private.ddp_logging_data(ddp)
        before = torch_private.collective_count()
        dist.all_reduce(torch.ones(1))
        assert torch_private.collective_count() == before + 1
        torch_private.default_store().set("key", "value")
    finally:
        dist.destroy_process_group()
    if dist.is_nccl_available():
        assert torch_private.nccl_options(timedelta(seconds=9))._timeout == timedelta(seconds=9)
