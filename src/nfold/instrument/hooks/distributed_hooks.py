"""DistributedDataParallel and DataParallel as a script makes them: noted, and changed for rungs."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed import distributed_c10d
from torch.distributed import distributed_c10d as module
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DistributedSampler

from nfold.engines.base import Task
from nfold.engines.interleaver import ActiveVariant
from nfold.engines.torch.communication.data_parallel import NO_BUFFER_SYNC
from nfold.engines.torch.communication.exchange_variants import CompletedWork, select_ddp_hook
from nfold.instrument.hooks.patches import Patches, PatchFactory
from nfold.instrument.hooks.runtime_hooks import EventCounter, tensor_bytes
from nfold.instrument.rank_environment import TORCHRUN_VARIABLES, drives_all_devices

DDP_SIGNATURE = inspect.signature(DistributedDataParallel.__init__)
BUFFER_BROADCAST_ARGUMENTS = ("broadcast_buffers", "forward_sync_buffers")


class DataParallelHooks:
    """Every DDP and DataParallel of the process, in the order in which they were made."""

    def __init__(self, variant: ActiveVariant, on_wrap: Callable[[], None]) -> None:
        self._variant = variant
        self._on_wrap = on_wrap
        self._hooks: dict[int, tuple[Any, Any]] = {}
        self._broadcasts: dict[int, bool] = {}
        self._forwards = 0
        self.gradient_exchanges = 0
        """Forwards of a DDP so far whose backward exchanges."""
        self.accumulation = 1
        """Batches of a step, once that is known."""
        self.ddp: list[Any] = []
        self.dp: list[Any] = []

    def install(self, patches: Patches, warm_up: Patches) -> None:
        """Note each; leave out what an experiment does."""
        once = not self._variant.is_baseline("exchange_each_micro_batch")
        (patches if once else warm_up).put(
            DistributedDataParallel, "forward", self._wrap_ddp_forward
        )
        patches.put(DistributedDataParallel, "__init__", self._wrap_ddp_init)
        patches.put(DataParallel, "__init__", self._wrap_dp_init)
        if not self._variant.is_baseline("exchange"):
            for name in ("register_comm_hook", "_register_builtin_comm_hook"):
                patches.put(DistributedDataParallel, name, self._wrap_register_comm_hook)
        if not self._variant.is_baseline("synchronised_batch_norm"):
            patches.put(nn.SyncBatchNorm, "forward", self._wrap_sync_batch_norm)

    def switch_variant(self) -> None:
        """What is left out has changed."""
        now = self._variant.current
        for wrapped in self.ddp:
            sends = self._broadcasts.setdefault(id(wrapped), bool(wrapped.broadcast_buffers))
            wrapped.broadcast_buffers = sends and now.broadcast_buffers and now.exchange != "none"
            wrapped.require_backward_grad_sync = True

    def exchanges_per_step(self, steps: int) -> float:
        """Of one DDP; of several, as in a GAN, nobody knows which of them is one too many."""
        each = self.gradient_exchanges / max(1, steps)
        return each if len(self.ddp) == 1 else min(1.0, each)

    def on_step(self) -> None:
        """A step ends: its forwards are counted anew."""
        self._forwards = 0

    def _wrap_ddp_forward(self, usual: Any) -> Any:
        @functools.wraps(usual)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self._forwards += 1
                if not self._variant.current.exchange_each_micro_batch:
                    module.require_backward_grad_sync = self._forwards == self.accumulation
                self.gradient_exchanges += bool(module.require_backward_grad_sync)
            return usual(module, *args, **kwargs)

        return forward

    def _wrap_sync_batch_norm(self, usual: Any) -> Any:
        def forward(module: Any, given: torch.Tensor) -> Any:
            real = self._variant.current.synchronised_batch_norm
            return (usual if real else _BatchNorm.forward)(module, given)

        return forward

    def _wrap_ddp_init(self, usual: Any) -> Any:
        def construct(module: Any, /, *args: Any, **kwargs: Any) -> None:
            given = DDP_SIGNATURE.bind(module, *args, **kwargs)
            given.arguments.update(self._argument_changes(given.arguments))
            usual(*given.args, **given.kwargs)
            self.ddp.append(module)
            self._on_wrap()
            if not self._variant.is_baseline("exchange"):
                ORIGINAL_REGISTER_COMM_HOOK(
                    module, module.process_group, self._gradient_hook(module)
                )

        return construct

    def _gradient_hook(self, wrapped: Any) -> Any:
        usual = (wrapped.process_group, default_hooks.allreduce_hook)

        def own(_state: Any, bucket: Any) -> Any:
            state, hook = self._hooks.get(id(wrapped), usual)
            return hook(state, bucket)

        return select_ddp_hook(self._variant, own)

    def _argument_changes(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments that an experiment sets.

        Where unused parameters are looked for, ranks exchange which they are in every backward,
        whatever the hook: without an exchange they do so in a group of one.
        """
        left_out = self._variant.current
        alone = left_out.exchange == "none"
        changed: dict[str, Any] = {}
        if alone or not left_out.broadcast_buffers:
            for name in BUFFER_BROADCAST_ARGUMENTS:
                arguments.pop(name, None)
            changed |= NO_BUFFER_SYNC
        if not left_out.find_unused_parameters:
            changed["find_unused_parameters"] = False
        elif alone and arguments.get("find_unused_parameters"):
            changed["process_group"] = _own_group()
        return changed

    def _wrap_dp_init(self, usual: Any) -> Any:
        def construct(module: Any, /, *args: Any, **kwargs: Any) -> None:
            usual(module, *args, **kwargs)
            self.dp.append(module)
            self._on_wrap()

        return construct

    def _wrap_register_comm_hook(self, _usual: Any) -> Any:
        def register(wrapped: Any, state: Any, hook: Any = None) -> None:
            self._hooks[id(wrapped)] = (
                (state, hook) if hook is not None else _python_comm_hook(state)
            )

        return register


def _python_comm_hook(kind: Any) -> tuple[Any, Any]:
    halves = kind == dist.BuiltinCommHookType.FP16_COMPRESS  # type: ignore[attr-defined]
    return None, default_hooks.fp16_compress_hook if halves else default_hooks.allreduce_hook


def _own_group() -> Any:
    return dist.new_subgroups(group_size=1)[0]  # type: ignore[no-untyped-call]


ORIGINAL_REGISTER_COMM_HOOK = DistributedDataParallel.register_comm_hook


def dp_devices(wrapped: Any) -> int:
    """Devices that a DataParallel drives; 0 where it has no GPU and only passes on."""
    return len(getattr(wrapped, "device_ids", ()) or ())


def bucket_bytes(wrapped: Any) -> tuple[int, ...]:
    """The gradients' buckets of a DDP as they are sent, () where it does not tell."""
    told = wrapped._get_ddp_logging_data()
    sizes = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or ""
    return tuple(int(size) for size in str(sizes).split(",") if size.strip().isdigit())


def comm_hook(wrapped: Any) -> str:
    """The name of what a DDP sends gradients with, "" for its own all-reduce."""
    return str(wrapped._get_ddp_logging_data().get("comm_hook") or "")


def unused_parameter_bytes(wrapped: Any) -> int:
    """Of parameters that a DDP found without a gradient in its last steps, where it looks."""
    return int(wrapped._get_ddp_logging_data().get("unused_parameter_size") or 0)


def buffers_of(wrapped: Any) -> list[torch.Tensor]:
    """The buffers that a DDP broadcasts before a forward."""
    return list(getattr(wrapped, "modules_buffers", ()))


def broadcasts_buffers(wrapped: Any) -> bool:
    """Whether it does."""
    return any(bool(getattr(wrapped, name, False)) for name in BUFFER_BROADCAST_ARGUMENTS)


NOT_REPLACED = ("broadcast_object_list", "scatter_object_list", "send", "recv", "isend", "irecv")
"""Left as they are: what they bring is not known to the rank that gets it."""


class CollectiveHooks:
    """Stands in for the collectives of ``torch.distributed``.

    ``left_out`` counts from ``begin`` on: before the first step scripts agree on what they do.
    """

    def __init__(self, variant: ActiveVariant, events: EventCounter) -> None:
        self._variant = variant
        self._events = events
        self._in_collective = False
        self._past_first_step = self._counts_after_warm_up = False
        self._bytes_in_step = self._steps = self._exchanging_steps = 0

    def install(self, patches: Patches, warm_up: Patches) -> None:
        """Replace the collectives in every module that holds them."""
        where = warm_up if self._variant.is_baseline("exchange") else patches
        self._patch_all(where)
        where.put(Join, "notify_join_context", self._wrap_notify_join)

    def _patch_all(self, where: Patches) -> None:
        for name in (*LOCAL_COLLECTIVES, *NOT_REPLACED):
            usual = getattr(module, name, None)
            if usual is None:
                continue
            stand_in = self._wrap_collective(usual, name)
            for owner in holders(name, usual):
                where.put(owner, name, _constant_patch(stand_in))

    def count_after_warm_up(self, patches: Patches) -> None:
        """Look after the warm-up, too, where none of its steps has exchanged what is trained."""
        self._counts_after_warm_up = not self._exchanging_steps
        if self._counts_after_warm_up and self._variant.is_baseline("exchange"):
            self._patch_all(patches)

    def on_step(self, trained_parameters: Callable[[], Iterable[Tensor]]) -> None:
        """A step is made; it may have exchanged most of what is trained, or its gradients."""
        if self._events.enabled or self._counts_after_warm_up:
            self._steps += 1
            self._exchanging_steps += bool(self._bytes_in_step) and 2 * self._bytes_in_step >= sum(
                map(tensor_bytes, trained_parameters())
            )
        self._bytes_in_step = 0

    @property
    def rare_exchanges(self) -> tuple[int, int] | None:
        """How many of how many steps have exchanged it, where not all did, and some."""
        counts = self._exchanging_steps, self._steps
        return counts if 0 < self._exchanging_steps < self._steps else None

    def on_first_step(self) -> None:
        """The first step is made: nothing is exchanged any more, where that was asked for."""
        self._past_first_step = True

    @property
    def _is_disabled(self) -> bool:
        return self._past_first_step and self._variant.current.exchange in ("none", "barrier")

    def _wrap_notify_join(self, usual: Any) -> Any:
        def notify(joined: Any) -> Any:
            without = self._past_first_step and self._variant.current.exchange == "none"
            return None if without else usual(joined)

        return notify

    def _wrap_collective(self, usual: Any, name: str) -> Any:
        signature = inspect.signature(usual)

        @functools.wraps(usual)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if self._in_collective:
                return usual(*args, **kwargs)
            if self._events.enabled or self._counts_after_warm_up:
                sent = collective_bytes(name, args, kwargs)
                self._bytes_in_step += sent * (name in LOCAL_COLLECTIVES)
                self._events.count("collective", name, sent)
            if name in LOCAL_COLLECTIVES and self._is_disabled and not self._is_one_element(args):
                return self._run_locally(name, signature.bind(*args, **kwargs))
            self._in_collective = True
            try:
                return usual(*args, **kwargs)
            finally:
                self._in_collective = False

        return collective

    def _is_one_element(self, args: tuple[Any, ...]) -> bool:
        """Whether a barrier would exchange just that: then it is the collective itself.

        Some scripts make hundreds of them in a step; whatever we do for each would be in a rung.
        """
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
    return lambda _usual: replacement


def holders(name: str, function: Any) -> Iterator[ModuleType]:
    """Yield the modules that hold ``function`` under its own name.

    These are ``torch.distributed``, the module that defines it, and modules that were imported
    before the patch with ``from torch.distributed import ...``.
    """
    for one in list(sys.modules.values()):
        if isinstance(one, ModuleType) and vars(one).get(name) is function:
            yield one


ORIGINAL_ALL_REDUCE = dist.all_reduce


def all_reduce_one_element(bound: inspect.BoundArguments, asynchronous: bool) -> Any:
    """An all-reduce of one element in the same group, on the same device."""
    group = bound.arguments.get("group")
    tensors = [value for value in bound.arguments.values() if isinstance(value, Tensor)]
    if tensors:
        device = tensors[0].device
    else:
        on_gpu = dist.get_backend(group) != "gloo" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.device("cuda" if on_gpu else "cpu")
    return ORIGINAL_ALL_REDUCE(torch.zeros(1, device=device), group=group, async_op=asynchronous)


def collective_bytes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """What one rank gives: of tensors that gather the smaller one, else the larger."""
    sizes = [
        tensor_bytes(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)
    ]
    return (min if "gather" in name else max)(sizes, default=0)


def _keep_tensor(*_args: Any) -> None:
    """The tensor stays as it is."""


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
LOCAL_COLLECTIVES: dict[str, Callable[..., None]] = dict(
    chain(
        ((name, _keep_tensor) for name in WITHOUT_OUTPUT),
        (
            ("all_gather", _all_gather),
            ("all_gather_into_tensor", _fill_tensor),
            ("all_gather_single", _fill_tensor),
            ("reduce_scatter_tensor", _fill_tensor),
            ("reduce_scatter_single", _fill_tensor),
            ("all_to_all_single", _fill_tensor),
            ("reduce_scatter", _copy_first),
            ("all_to_all", _all_to_all),
            ("gather", _gather),
            ("scatter", _scatter),
            ("all_gather_object", _all_gather_object),
            ("gather_object", _gather_object),
        ),
    )
)
"""By the name of the collective; arguments in the order of ``torch.distributed``.

PyTorch 2.13 renamed ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` to
``all_gather_single`` and ``reduce_scatter_single``. It keeps the old names, which call the new
ones; older versions have only the old names.
"""


# Ranks that a script would start by ``torch.multiprocessing.spawn``: those that there are already.
#
# Every rank of ours runs the script to that call, and there calls the function itself, with its own
# index. The process group that the function makes is that of our ranks, whatever address and size
# the script has in it: a run on one device has a world of one.

SPAWN_FUNCTIONS = ("spawn", "start_processes")
RENDEZVOUS_ARGUMENTS = ("init_method", "rank", "world_size", "store")
"""Of ``init_process_group``: where ranks meet, and which of how many this one is."""


def install_spawn_hooks(task: Task, patches: Patches) -> None:
    """Put it in the place of what starts ranks; one process that drives all devices has none."""
    if drives_all_devices(task):
        return
    ranks = SpawnedRanks()
    for owner in (multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        for name in SPAWN_FUNCTIONS:
            patches.put(owner, name, ranks.wrap_spawn)
    for owner in (dist, distributed_c10d):
        patches.put(owner, "init_process_group", ranks.wrap_init_process_group)
    patches.put(DistributedSampler, "__init__", ranks.wrap_sampler_init)


class FinishedProcesses:
    """What ``spawn`` returns to a script that waits for its ranks itself."""

    def __init__(self) -> None:
        self.processes: list[Any] = []

    def join(self, *_: Any, **__: Any) -> bool:
        """All of them are through."""
        return True

    def pids(self) -> list[int]:
        """There are none."""
        return []


class SpawnedRanks:
    """This rank in the place of those that the script starts; until it does nothing is changed."""

    def __init__(self) -> None:
        self._torchrun_variables = {
            name: os.environ[name] for name in TORCHRUN_VARIABLES if name in os.environ
        }
        self._started = False

    def wrap_spawn(self, usual: Any) -> Any:
        """``spawn`` and ``start_processes``: the function is called here, once."""

        @functools.wraps(usual)
        def start(
            fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
        ) -> Any:
            self._started = True
            fn(int(self._torchrun_variables["LOCAL_RANK"]), *args)
            return None if join else FinishedProcesses()

        return start

    def wrap_init_process_group(self, usual: Any) -> Any:
        """``init_process_group``: the script's own place in its world does not count."""
        signature = inspect.signature(usual)

        @functools.wraps(usual)
        def join(*args: Any, **kwargs: Any) -> Any:
            if not self._started:
                return usual(*args, **kwargs)
            os.environ |= self._torchrun_variables
            told = signature.bind(*args, **kwargs)
            for name in RENDEZVOUS_ARGUMENTS:
                told.arguments.pop(name, None)
            return usual(*told.args, **told.kwargs)

        return join

    def wrap_sampler_init(self, usual: Any) -> Any:
        """DistributedSampler: into as many parts as there are ranks."""

        @functools.wraps(usual)
        def divide(
            sampler: Any, dataset: Any, num_replicas: Any = None, rank: Any = None, **more: Any
        ) -> None:
            if self._started and num_replicas is not None:
                num_replicas, rank = (
                    int(self._torchrun_variables["WORLD_SIZE"]),
                    int(self._torchrun_variables["RANK"]),
                )
            usual(sampler, dataset, num_replicas, rank, **more)

        return divide
