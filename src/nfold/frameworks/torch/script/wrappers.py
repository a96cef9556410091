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

from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.torch.ablate_exchange import ddp_hook
from nfold.frameworks.torch.parallel import WITHOUT_BUFFERS
from nfold.frameworks.torch.script.patches import Patches

SIGNATURE = inspect.signature(DistributedDataParallel.__init__)
OTHER_NAME = ("broadcast_buffers", "forward_sync_buffers")


class Wrappers:
    """Every DDP and DataParallel of the process, in the order in which they were made."""

    def __init__(self, left_out: LeftOut, made: Callable[[], None]) -> None:
        self._left_out = left_out
        self._made = made
        self._hooks: dict[int, tuple[Any, Any]] = {}
        self._sends: dict[int, bool] = {}
        self._forwards = 0
        self.exchanges = 0
        """Forwards of a DDP so far whose backward exchanges."""
        self.accumulation = 1
        """Batches of a step, once that is known."""
        self.ddp: list[Any] = []
        self.dp: list[Any] = []

    def install(self, patches: Patches, warm_up: Patches) -> None:
        """Note each; leave out what an experiment does."""
        once = not self._left_out.never("repeated_exchange")
        (patches if once else warm_up).put(DistributedDataParallel, "forward", self._computing)
        patches.put(DistributedDataParallel, "__init__", self._constructing_ddp)
        patches.put(DataParallel, "__init__", self._constructing_dp)
        if not self._left_out.never("exchange"):
            for name in ("register_comm_hook", "_register_builtin_comm_hook"):
                patches.put(DistributedDataParallel, name, self._registering)
        if not self._left_out.never("synchronised_batch_norm"):
            patches.put(nn.SyncBatchNorm, "forward", self._normalising)

    def turn(self) -> None:
        """What is left out has changed."""
        now = self._left_out.now
        for wrapped in self.ddp:
            sends = self._sends.setdefault(id(wrapped), bool(wrapped.broadcast_buffers))
            wrapped.broadcast_buffers = sends and now.buffers and now.exchange != "none"
            wrapped.require_backward_grad_sync = True

    def exchanges_a_step(self, steps: int) -> float:
        """Of one DDP; of several, as in a GAN, nobody knows which of them is one too many."""
        each = self.exchanges / max(1, steps)
        return each if len(self.ddp) == 1 else min(1.0, each)

    def stepped(self) -> None:
        """A step ends: its forwards are counted anew."""
        self._forwards = 0

    def _computing(self, usual: Any) -> Any:
        @functools.wraps(usual)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self._forwards += 1
                if not self._left_out.now.repeated_exchange:
                    module.require_backward_grad_sync = self._forwards == self.accumulation
                self.exchanges += bool(module.require_backward_grad_sync)
            return usual(module, *args, **kwargs)

        return forward

    def _normalising(self, usual: Any) -> Any:
        def forward(module: Any, given: torch.Tensor) -> Any:
            real = self._left_out.now.synchronised_batch_norm
            return (usual if real else _BatchNorm.forward)(module, given)

        return forward

    def _constructing_ddp(self, usual: Any) -> Any:
        def construct(module: Any, /, *args: Any, **kwargs: Any) -> None:
            given = SIGNATURE.bind(module, *args, **kwargs)
            given.arguments.update(self._changes(given.arguments))
            usual(*given.args, **given.kwargs)
            self.ddp.append(module)
            self._made()
            if not self._left_out.never("exchange"):
                HOOK(module, module.process_group, self._exchanging(module))

        return construct

    def _exchanging(self, wrapped: Any) -> Any:
        """A hook that does with a bucket what is done now: by default, what the script says."""
        usual = (wrapped.process_group, default_hooks.allreduce_hook)

        def own(_state: Any, bucket: Any) -> Any:
            state, hook = self._hooks.get(id(wrapped), usual)
            return hook(state, bucket)

        return ddp_hook(self._left_out, own)

    def _changes(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments that an experiment sets.

        Where unused parameters are looked for, ranks exchange which they are in every backward,
        whatever the hook: without an exchange they do so in a group of one.
        """
        left_out = self._left_out.now
        alone = left_out.exchange == "none"
        changed: dict[str, Any] = {}
        if alone or not left_out.buffers:
            for name in OTHER_NAME:
                given.pop(name, None)
            changed |= WITHOUT_BUFFERS
        if not left_out.unused_parameters:
            changed["find_unused_parameters"] = False
        elif alone and given.get("find_unused_parameters"):
            changed["process_group"] = _own_group()
        return changed

    def _constructing_dp(self, usual: Any) -> Any:
        def construct(module: Any, /, *args: Any, **kwargs: Any) -> None:
            usual(module, *args, **kwargs)
            self.dp.append(module)
            self._made()

        return construct

    def _registering(self, _usual: Any) -> Any:
        """The script's own hook is kept for its turns; elsewhere nothing is exchanged by it."""

        def register(wrapped: Any, state: Any, hook: Any = None) -> None:
            self._hooks[id(wrapped)] = (state, hook) if hook is not None else _builtin(state)

        return register


def _builtin(kind: Any) -> tuple[Any, Any]:
    """The hook in Python that does what one of C++ does, with its state."""
    halves = kind == dist.BuiltinCommHookType.FP16_COMPRESS  # type: ignore[attr-defined]
    return None, default_hooks.fp16_compress_hook if halves else default_hooks.allreduce_hook


def _own_group() -> Any:
    """A process group of this rank alone; every rank makes its own at the same time."""
    return dist.new_subgroups(group_size=1)[0]  # type: ignore[no-untyped-call]


HOOK = DistributedDataParallel.register_comm_hook


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


def unused_bytes(wrapped: Any) -> int:
    """Of parameters that a DDP found without a gradient in its last steps, where it looks."""
    return int(wrapped._get_ddp_logging_data().get("unused_parameter_size") or 0)


def buffers_of(wrapped: Any) -> list[torch.Tensor]:
    """The buffers that a DDP broadcasts before a forward."""
    return list(getattr(wrapped, "modules_buffers", ()))


def broadcasts_buffers(wrapped: Any) -> bool:
    """Whether it does."""
    return any(bool(getattr(wrapped, name, False)) for name in OTHER_NAME)
