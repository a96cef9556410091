"""DistributedDataParallel and DataParallel as a script makes them: noted, and changed for rungs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nfold.frameworks.left_out import ActiveVariant
from nfold.frameworks.torch.ablate_exchange import select_ddp_hook
from nfold.frameworks.torch.parallel import NO_BUFFER_SYNC
from nfold.frameworks.torch.script.patches import Patches

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
        """A hook that does with a bucket what is done now: by default, what the script says."""
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
        """The script's own hook is kept for its turns; elsewhere nothing is exchanged by it."""

        def register(wrapped: Any, state: Any, hook: Any = None) -> None:
            self._hooks[id(wrapped)] = (
                (state, hook) if hook is not None else _python_comm_hook(state)
            )

        return register


def _python_comm_hook(kind: Any) -> tuple[Any, Any]:
    """The hook in Python that does what one of C++ does, with its state."""
    halves = kind == dist.BuiltinCommHookType.FP16_COMPRESS  # type: ignore[attr-defined]
    return None, default_hooks.fp16_compress_hook if halves else default_hooks.allreduce_hook


def _own_group() -> Any:
    """A process group of this rank alone; every rank makes its own at the same time."""
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
