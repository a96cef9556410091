"""Hooks of DDP, DataParallel, collectives and ``torch.multiprocessing.spawn``."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DistributedSampler

from nfold.core.source_location import frame_line, is_user_code
from nfold.engines.base import Task
from nfold.engines.interleaver import ActiveVariant
from nfold.engines.torch.communication.data_parallel import NO_BUFFER_SYNC
from nfold.engines.torch.communication.gradient_exchange import (
    CompletedWork,
    replaces_ddp_hook,
    select_ddp_hook,
)
from nfold.instrument import torch_private
from nfold.instrument.hooks.gathered_tensors import GATHERS
from nfold.instrument.hooks.patches import Patches, PatchFactory, holders, wrap_everywhere
from nfold.instrument.hooks.runtime_hooks import EventCounter, tensor_bytes
from nfold.instrument.rank_environment import TORCHRUN_VARIABLES, drives_all_devices

DDP_SIGNATURE = inspect.signature(DistributedDataParallel.__init__)
BUFFER_BROADCAST_ARGUMENTS = ("broadcast_buffers", "forward_sync_buffers")


COLLECTIVE_MODULES = (dist, distributed_c10d)


class DataParallelHooks:
    """Records every DDP and DataParallel of the process, in order of construction.

    A variant may change their constructor arguments, their communication hooks and their forward.
    """

    def __init__(self, variant: ActiveVariant, on_wrap: Callable[[], None]) -> None:
        self._variant = variant
        self._on_wrap = on_wrap
        self._hooks: dict[int, tuple[Any, Any]] = {}
        self._broadcasts: dict[int, bool] = {}
        self._forwards = 0
        self.gradient_exchanges = 0  # forwards of a DDP whose backward exchanges gradients
        self.accumulation = 1  # batches per step
        self.has_replaced_batch_norm = False
        self.ddp: list[Any] = []
        self.dp: list[Any] = []

    def install(self, patches: Patches, warm_up: Patches) -> None:
        always = not self._variant.is_baseline("exchange_each_micro_batch")
        (patches if always else warm_up).wrap(DistributedDataParallel, "forward", self._ddp_forward)
        patches.wrap(DistributedDataParallel, "__init__", self._construct_ddp)
        patches.wrap(DataParallel, "__init__", self._construct_dp)
        if replaces_ddp_hook(self._variant):
            for name in ("register_comm_hook", torch_private.REGISTER_BUILTIN_HOOK):
                patches.wrap(DistributedDataParallel, name, self._register_comm_hook)
        if not self._variant.is_baseline("synchronised_batch_norm"):
            patches.wrap(nn.SyncBatchNorm, "forward", self._sync_batch_norm)

    def switch_variant(self) -> None:
        now = self._variant.current
        for wrapped in self.ddp:
            sends = self._broadcasts.setdefault(id(wrapped), bool(wrapped.broadcast_buffers))
            wrapped.broadcast_buffers = sends and now.broadcast_buffers and now.exchange != "none"
            wrapped.require_backward_grad_sync = True

    def exchanges_per_step(self, steps: int) -> float:
        """Return the gradient exchanges of a step under one DDP.

        Several DDP modules, as in a GAN, count as at most one exchange.
        """
        each = self.gradient_exchanges / max(1, steps)
        return each if len(self.ddp) == 1 else min(1.0, each)

    def on_step(self) -> None:
        self._forwards = 0

    def wrapped_model(self, module: nn.Module) -> nn.Module | None:
        """Return the model that a DDP wraps and ``module`` is part of, or None."""
        if isinstance(module, DistributedDataParallel):
            return None
        models: list[nn.Module] = [wrapped.module for wrapped in self.ddp]
        return next((m for m in models if any(part is module for part in m.modules())), None)

    def facts(self) -> dict[str, Any]:
        """Return the facts of the first DDP, and the GPUs of the first DataParallel."""
        facts: dict[str, Any] = {"dp_devices": len(self.dp[0].device_ids or ()) if self.dp else 0}
        for ddp in self.ddp[:1]:
            logged = torch_private.ddp_logging_data(ddp)
            sizes = str(logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or "")
            buffers = list(getattr(ddp, "modules_buffers", ()))
            broadcasts = any(getattr(ddp, name, False) for name in BUFFER_BROADCAST_ARGUMENTS)
            facts |= {
                "find_unused_parameters": bool(ddp.find_unused_parameters),
                "unused_parameter_bytes": int(logged.get("unused_parameter_size") or 0),
                "broadcast_buffers": broadcasts and bool(buffers),
                "buffers": len(buffers),
                "buffer_bytes": sum(map(tensor_bytes, buffers)),
                "bucket_bytes": tuple(int(n) for n in sizes.split(",") if n.strip().isdigit()),
                "comm_hook": str(logged.get("comm_hook") or ""),
            }
        return facts

    def _ddp_forward(self, original: Any, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._forwards += 1
            if not self._variant.current.exchange_each_micro_batch:
                module.require_backward_grad_sync = self._forwards == self.accumulation
            self.gradient_exchanges += bool(module.require_backward_grad_sync)
        return original(module, *args, **kwargs)

    def _sync_batch_norm(self, original: Any, module: Any, inputs: Tensor) -> Any:
        real = self._variant.current.synchronised_batch_norm
        self.has_replaced_batch_norm |= not real
        return (original if real else torch_private.BatchNorm.forward)(module, inputs)

    def _construct_ddp(self, original: Any, module: Any, /, *args: Any, **kwargs: Any) -> None:
        bound = DDP_SIGNATURE.bind(module, *args, **kwargs)
        bound.arguments.update(self._argument_changes(bound.arguments))
        original(*bound.args, **bound.kwargs)
        self.ddp.append(module)
        self._on_wrap()
        if not replaces_ddp_hook(self._variant):
            return
        group = module.process_group

        def script_hook(_state: Any, bucket: Any) -> Any:
            state, hook = self._hooks.get(id(module), (group, default_hooks.allreduce_hook))
            return hook(state, bucket)

        ORIGINAL_REGISTER_COMM_HOOK(module, group, select_ddp_hook(self._variant, script_hook))

    def _argument_changes(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the constructor arguments that the variant sets.

        With ``find_unused_parameters`` ranks exchange the unused parameters in every backward,
        whatever the hook. Without an exchange they do so in a group of one rank.
        """
        variant = self._variant.current
        no_exchange = variant.exchange == "none"
        changed = variant.ddp_arguments()
        if no_exchange or not variant.broadcast_buffers:
            for name in BUFFER_BROADCAST_ARGUMENTS:
                arguments.pop(name, None)
            changed |= NO_BUFFER_SYNC
        if no_exchange and (arguments | changed).get("find_unused_parameters"):
            group = dist.new_subgroups(group_size=1)[0]  # type: ignore[no-untyped-call]
            changed["process_group"] = group
        return changed

    def _construct_dp(self, original: Any, module: Any, /, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        self.dp.append(module)
        self._on_wrap()

    def _register_comm_hook(
        self, _original: Any, module: Any, state: Any, hook: Any = None
    ) -> None:
        if hook is None:  # a built-in hook: ``state`` is its type
            fp16 = state == dist.BuiltinCommHookType.FP16_COMPRESS  # type: ignore[attr-defined]
            hook = default_hooks.fp16_compress_hook if fp16 else default_hooks.allreduce_hook
            state = None
        self._hooks[id(module)] = state, hook


def calling_line(model: nn.Module) -> str | None:
    """Return the innermost line of user code that is not in a method of the model or its parts."""
    parts = {id(part) for part in model.modules()}
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if is_user_code(frame.f_code.co_filename) and id(frame.f_locals.get("self")) not in parts:
            return frame_line(frame)
    return None


ORIGINAL_REGISTER_COMM_HOOK = DistributedDataParallel.register_comm_hook


# Not replaced: the receiving rank does not know the content.
NOT_REPLACED = ("broadcast_object_list", "scatter_object_list", "send", "recv", "isend", "irecv")


class CollectiveHooks:
    """Counts the collectives of ``torch.distributed``, and can replace them by local copies.

    Replacement begins after the first step: before it, scripts exchange settings.
    """

    def __init__(
        self,
        variant: ActiveVariant,
        events: EventCounter,
        on_gather: Callable[[Any], None] | None = None,
    ) -> None:
        """``on_gather`` gets the outputs of a gather, while events are counted."""
        self._variant = variant
        self._events = events
        self._on_gather = on_gather
        self._in_collective = self._past_first_step = False

    def install(self, patches: Patches, warm_up: Patches) -> None:
        where = warm_up if self._variant.is_baseline("exchange") else patches
        where.wrap(Join, "notify_join_context", self._notify_join_context)
        for name in (*LOCAL_COLLECTIVES, *NOT_REPLACED):
            original = getattr(distributed_c10d, name, None)
            if original is None:
                continue
            replacement = self._wrap_collective(original, name)
            for owner in holders(name, original, *COLLECTIVE_MODULES):
                where.put(owner, name, _constant_patch(replacement))

    def on_first_step(self) -> None:
        self._past_first_step = True

    def _notify_join_context(self, original: Any, joined: Any) -> Any:
        skip = self._past_first_step and self._variant.current.exchange == "none"
        return None if skip else original(joined)

    def _wrap_collective(self, original: Any, name: str) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if self._in_collective:
                return original(*args, **kwargs)
            if self._events.enabled:
                self._events.count("collective", name, collective_bytes(name, args, kwargs))
            disabled = self._past_first_step and self._variant.current.exchange in (
                "none",
                "barrier",
            )
            if name in LOCAL_COLLECTIVES and disabled and not self._is_one_element(args):
                return self._run_locally(name, signature.bind(*args, **kwargs))
            self._in_collective = True
            try:
                return original(*args, **kwargs)
            finally:
                self._in_collective = False
                if self._on_gather is not None and self._events.enabled and name in GATHERS:
                    self._on_gather(args[0] if args else next(iter(kwargs.values()), None))

        return collective

    def _is_one_element(self, args: tuple[Any, ...]) -> bool:
        # The variant "barrier" would exchange one element: the real call is the same. Some scripts
        # make hundreds of them in a step, and any work here would be measured.
        if self._variant.current.exchange != "barrier" or not args:
            return False
        return isinstance(args[0], Tensor) and args[0].numel() == 1

    def _run_locally(self, name: str, bound: inspect.BoundArguments) -> Any:
        bound.apply_defaults()
        asynchronous = bool(bound.arguments.get("async_op"))
        work: Any = CompletedWork()
        if self._variant.current.exchange == "barrier":
            work = all_reduce_one_element(bound, asynchronous)
        LOCAL_COLLECTIVES[name](*bound.arguments.values())
        return work if asynchronous else None


def _constant_patch(replacement: Any) -> PatchFactory:
    return lambda _original: replacement


ORIGINAL_ALL_REDUCE = dist.all_reduce


def all_reduce_one_element(bound: inspect.BoundArguments, asynchronous: bool) -> Any:
    """All-reduce one element in the group and on the device of a bound collective call."""
    group = bound.arguments.get("group")
    tensors = [value for value in bound.arguments.values() if isinstance(value, Tensor)]
    if tensors:
        device = tensors[0].device
    else:
        on_gpu = dist.get_backend(group) != "gloo" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.device("cuda" if on_gpu else "cpu")
    return ORIGINAL_ALL_REDUCE(torch.zeros(1, device=device), group=group, async_op=asynchronous)


def collective_bytes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes that one rank sends: the smaller tensor of a gather, else the larger."""
    sizes = [
        tensor_bytes(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)
    ]
    return (min if "gather" in name else max)(sizes, default=0)


def _keep_tensor(*_args: Any) -> None: ...


def _all_gather(outputs: list[Tensor], tensor: Tensor, *_args: Any) -> None:
    for output in outputs:
        output.copy_(tensor)


def _fill_tensor(output: Tensor, tensor: Tensor, *_args: Any) -> None:
    own, size = tensor.reshape(-1), output.numel()
    times = -(-size // max(1, len(own)))
    output.copy_((own if times == 1 else own.repeat(times))[:size].view_as(output))


def _copy_first(output: Tensor, inputs: list[Tensor], *_args: Any) -> None:
    output.copy_(inputs[0])


def _all_to_all(outputs: list[Tensor], inputs: list[Tensor], *_args: Any) -> None:
    for output, own in zip(outputs, inputs, strict=False):
        _fill_tensor(output, own)


def _gather(tensor: Tensor, gather_list: list[Tensor] | None = None, *_args: Any) -> None:
    _all_gather(gather_list or [], tensor)


def _scatter(tensor: Tensor, scatter_list: list[Tensor] | None = None, *_args: Any) -> None:
    if scatter_list:
        tensor.copy_(scatter_list[0])


def _all_gather_object(outputs: list[Any], value: Any, *_args: Any) -> None:
    outputs[:] = [value] * len(outputs)


def _gather_object(value: Any, outputs: list[Any] | None = None, *_args: Any) -> None:
    if outputs:
        _all_gather_object(outputs, value)


WITHOUT_OUTPUT = ("all_reduce", "broadcast", "reduce", "barrier", "monitored_barrier")
# By the name of the collective; arguments in the order of torch.distributed. PyTorch 2.13 renamed
# all_gather_into_tensor and reduce_scatter_tensor to all_gather_single and reduce_scatter_single.
# It keeps the old names, which call the new ones; older versions have only the old names.
LOCAL_COLLECTIVES: dict[str, Callable[..., None]] = {
    **dict.fromkeys(WITHOUT_OUTPUT, _keep_tensor),
    "all_gather": _all_gather,
    "all_gather_into_tensor": _fill_tensor,
    "all_gather_single": _fill_tensor,
    "reduce_scatter_tensor": _fill_tensor,
    "reduce_scatter_single": _fill_tensor,
    "all_to_all_single": _fill_tensor,
    "reduce_scatter": _copy_first,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
}


# torch.multiprocessing.spawn: torchrun has started the ranks. Each runs the script up to the
# call of spawn, and calls the spawned function with its own index. The process group uses
# the address and the size of the ranks of nfold: a run on one device has a world of one rank.

SPAWN_FUNCTIONS = ("spawn", "start_processes")
# Arguments of init_process_group that nfold replaces.
RENDEZVOUS_ARGUMENTS = ("init_method", "rank", "world_size", "store")


def install_spawn_hooks(task: Task, patches: Patches) -> None:
    """Run the function given to ``torch.multiprocessing.spawn`` in this process instead.

    Does nothing if one process drives all devices.
    """
    if drives_all_devices(task):
        return
    ranks = SpawnedRanks()
    homes = multiprocessing, sys.modules["torch.multiprocessing.spawn"]
    for name in SPAWN_FUNCTIONS:
        wrap_everywhere(patches, name, ranks.spawn, *homes)
    wrap_everywhere(patches, "init_process_group", ranks.init_process_group, *COLLECTIVE_MODULES)
    patches.wrap(DistributedSampler, "__init__", ranks.construct_sampler)


class FinishedProcesses:
    """The return value of ``spawn(join=False)``: processes that have ended."""

    def __init__(self) -> None:
        self.processes: list[Any] = []

    def join(self, *_: Any, **__: Any) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


class SpawnedRanks:
    """Makes this rank one of the ranks that a script spawns. Inactive until the script spawns."""

    def __init__(self) -> None:
        self._torchrun_variables = {
            name: os.environ[name] for name in TORCHRUN_VARIABLES if name in os.environ
        }
        self._started = False

    def spawn(
        self,
        _original: Any,
        fn: Any,
        args: Any = (),
        nprocs: int = 1,
        join: bool = True,
        *_: Any,
        **__: Any,
    ) -> Any:
        self._started = True
        fn(int(self._torchrun_variables["LOCAL_RANK"]), *args)
        return None if join else FinishedProcesses()

    def init_process_group(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._started:
            return original(*args, **kwargs)
        os.environ |= self._torchrun_variables
        bound = inspect.signature(original).bind(*args, **kwargs)
        for name in RENDEZVOUS_ARGUMENTS:
            bound.arguments.pop(name, None)
        return original(*bound.args, **bound.kwargs)

    def construct_sampler(
        self,
        original: Any,
        sampler: Any,
        dataset: Any,
        num_replicas: Any = None,
        rank: Any = None,
        **kwargs: Any,
    ) -> None:
        if self._started and num_replicas is not None:
            num_replicas = int(self._torchrun_variables["WORLD_SIZE"])
            rank = int(self._torchrun_variables["RANK"])
        original(sampler, dataset, num_replicas, rank, **kwargs)
