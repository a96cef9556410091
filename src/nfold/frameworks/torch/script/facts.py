"""From what was watched in a script's warm-up to its facts, ``Seen``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DistributedSampler

from nfold.frameworks.torch.script import tensors
from nfold.frameworks.torch.script.divided import is_tensor_parallel
from nfold.frameworks.torch.script.ends import (
    epoch_length_is_read_ahead,
    length_or_none,
    script_sampler,
)
from nfold.frameworks.torch.script.forward import HALF_PRECISIONS
from nfold.frameworks.torch.script.overrides import batch_size_of, samplers_of
from nfold.frameworks.torch.script.passes import is_cycled
from nfold.frameworks.torch.script.sparse import is_sparse, tensor_bytes
from nfold.frameworks.torch.script.stand_ins import LOCAL_COLLECTIVES
from nfold.frameworks.torch.script.tally import EventCounter
from nfold.frameworks.torch.script.wrappers import (
    DataParallelHooks,
    broadcasts_buffers,
    bucket_bytes,
    buffers_of,
    comm_hook,
    dp_devices,
    unused_parameter_bytes,
)
from nfold.seen import SHARDED, CollectiveUse, DataLoaderProfile, HostToDeviceCopies, Parallelism

SHARDED_TYPES = ("DTensor", "FlatParameter")
PIPELINING_MODULE = "torch.distributed.pipelining"
ALL_TO_ALL = ("all_to_all", "all_to_all_single")
POINT_TO_POINT = ("send", "recv", "isend", "irecv")


def detect_parallelism(
    wrappers: DataParallelHooks,
    parameters: Sequence[Tensor],
    events: EventCounter,
    models: Sequence[nn.Module] = (),
) -> Parallelism:
    """How the script uses several devices; ``models`` are what it calls."""
    if any(type(p).__name__ in SHARDED_TYPES or hasattr(p, "_is_flat_param") for p in parameters):
        return "tensor" if is_tensor_parallel(models) else "fsdp"
    if PIPELINING_MODULE in sys.modules and any(events.counts[name] for name in POINT_TO_POINT):
        return "pipeline"
    if wrappers.ddp:
        return "ddp"
    if wrappers.dp:
        return "dp"
    return "other" if any(events.counts[name] for name in LOCAL_COLLECTIVES) else "none"


def replicated_parameters(
    parallelism: Parallelism,
    wrappers: DataParallelHooks,
    parameters: Sequence[Tensor],
    events: EventCounter,
) -> Sequence[Tensor]:
    """Those that all ranks must have: of what is divided none.

    Who sends a part to each rank, of what it computes, has parts of a model beside a wrapper, such
    as tables or experts.
    """
    if parallelism in SHARDED:
        return ()
    if parallelism != "ddp" or not any(events.counts[name] for name in ALL_TO_ALL):
        return parameters
    wrapped = {id(one) for module in wrappers.ddp for one in module.parameters()}
    return [one for one in parameters if id(one) in wrapped]


def backend_of(device: str) -> str:
    """What exchanges tensors of a kind of device: a group may have one backend for each."""
    configured = [pair.partition(":") for pair in dist.get_backend_config().split(",")]
    return next((backend for kind, _, backend in configured if kind == device), dist.get_backend())


def has_process_group() -> bool:
    """Whether the script has joined a process group."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """The ranks of that group, 1 without one."""
    return dist.get_world_size() if has_process_group() else 1


def group_facts(device: str) -> dict[str, Any]:
    """The process group that the script has joined, for tensors of a kind of device."""
    return {
        "process_group": has_process_group(),
        "backend": backend_of(device) if has_process_group() else None,
        "world_size": world_size(),
    }


def wrapper_facts(wrappers: DataParallelHooks) -> dict[str, Any]:
    """Of the first DDP, and the devices of the first DataParallel."""
    found: dict[str, Any] = {"dp_devices": dp_devices(wrappers.dp[0]) if wrappers.dp else 0}
    for wrapped in wrappers.ddp[:1]:
        buffers = buffers_of(wrapped)
        found |= {
            "find_unused_parameters": bool(wrapped.find_unused_parameters),
            "unused_parameter_bytes": unused_parameter_bytes(wrapped),
            "broadcast_buffers": broadcasts_buffers(wrapped) and bool(buffers),
            "buffers": len(buffers),
            "buffer_bytes": sum(map(tensor_bytes, buffers)),
            "bucket_bytes": bucket_bytes(wrapped),
            "comm_hook": comm_hook(wrapped),
        }
    return found


def model_facts(model: Any, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Of the parameters that are trained, and of the model's convolutions and normalisations."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    return {
        "parameter_count": sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": sum(parameter.nbytes for parameter in parameters),
        "sparse_gradient_bytes": sum(one.nbytes for one in parameters if is_sparse(one.grad)),
        "convolutions": sum(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in modules),
        "batch_norms": sum(isinstance(module, _BatchNorm) for module in modules),
        "synchronised_batch_norms": sum(isinstance(m, nn.SyncBatchNorm) for m in modules),
    }


def count_facts(events: EventCounter, steps: int) -> dict[str, Any]:
    """What happened in a step, over the steps that were counted."""
    steps = max(1, steps)
    counts, sizes = events.counts, events.bytes
    copies = counts[tensors.COPY] + counts[tensors.PINNED]
    names = sorted(set(counts) - {tensors.COPY, tensors.PINNED, tensors.HOST_SYNC})
    return {
        "copies": HostToDeviceCopies(
            per_step=copies / steps,
            bytes_per_step=(sizes[tensors.COPY] + sizes[tensors.PINNED]) / steps,
            pinned_per_step=counts[tensors.PINNED] / steps,
        ),
        "host_syncs": counts[tensors.HOST_SYNC] / steps,
        "collectives": tuple(
            CollectiveUse(name=n, per_step=counts[n] / steps, bytes_per_step=sizes[n] / steps)
            for n in names
        ),
        "source_locations": dict(events.source_locations(steps)),
    }


def loader_facts(
    loader: Any, created_at: str | None, host_tensors: tuple[int, ...] = ()
) -> DataLoaderProfile:
    """Of a DataLoader that feeds the training."""
    batch, batches = batch_size_of(loader), length_or_none(loader)
    return DataLoaderProfile(
        batch_size=batch,
        batches_per_epoch=batches,
        dataset_size=length_or_none(loader.dataset),
        sampler=_sampler_name(loader),
        shards_dataset=_shards_dataset(loader, batch, batches),
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        pin_memory=bool(loader.pin_memory),
        persistent_workers=bool(loader.persistent_workers),
        length_read_ahead=epoch_length_is_read_ahead(),
        host_tensors=host_tensors,
        cycled=is_cycled(loader),
        created_at=created_at,
    )


def has_compiled_code() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"]["unique_graphs"])


def precision_of(parameters: Sequence[Tensor], autocast: str | None) -> str:
    """What the forward computes in, by a plan's names."""
    if autocast is not None:
        return autocast
    half = next((HALF_PRECISIONS[p.dtype] for p in parameters if p.dtype in HALF_PRECISIONS), None)
    on_gpu = any(parameter.is_cuda for parameter in parameters)
    return half or ("tf32" if on_gpu and _tf32() else "fp32")


def _tf32() -> bool:
    # PyTorch refuses to answer where a script mixes its two ways to ask for TF32.
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision() != "highest"
    return True


def _sampler_name(loader: Any) -> str:
    """Of what makes the batches where that is not PyTorch's own, else of what gives indices."""
    outer = script_sampler(loader.batch_sampler)
    if outer is None or type(outer).__name__ != "BatchSampler":
        return type(script_sampler(loader.sampler) if outer is None else outer).__name__
    return type(outer.sampler).__name__


def _shards_dataset(loader: Any, batch: int | None, batches: int | None) -> bool | None:
    """Whether the ranks' parts of the data set differ: by its sampler, else by its length."""
    world = world_size()
    if world == 1:
        return None
    for sampler in (script_sampler(loader.sampler), *samplers_of(loader)):
        replicas = getattr(sampler, "num_replicas", None) or getattr(sampler, "num_processes", 0)
        if replicas or isinstance(sampler, DistributedSampler):
            return bool(replicas and replicas > 1)
    whole = _underlying_dataset(loader.dataset)
    if batch is None or batches is None or not hasattr(whole, "__len__"):
        return None
    return bool(batches * batch <= len(whole) / world + batch)


def _underlying_dataset(dataset: Any) -> Any:
    """The data set that a Subset is a part of."""
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset
