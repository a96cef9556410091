"""DistributedDataParallel and DataParallel as a script makes them: noted, and changed for rungs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nfold.ablation import Ablation
from nfold.frameworks.torch.ablate_exchange import DDP_HOOKS
from nfold.frameworks.torch.parallel import WITHOUT_BUFFERS
from nfold.frameworks.torch.script.patches import Patches

SIGNATURE = inspect.signature(DistributedDataParallel.__init__)
OTHER_NAME = ("broadcast_buffers", "forward_sync_buffers")


class Wrappers:
    """Every DDP and DataParallel of the process, in the order in which they were made."""

    def __init__(self, left_out: Ablation, made: Callable[[], None]) -> None:
        self._left_out = left_out
        self._made = made
        self.ddp: list[Any] = []
        self.dp: list[Any] = []

    def install(self, patches: Patches) -> None:
        """Note each; leave out what an experiment does."""
        patches.put(DistributedDataParallel, "__init__", self._constructing_ddp)
        patches.put(DataParallel, "__init__", self._constructing_dp)
        if self._left_out.exchange != "real":
            for name in ("register_comm_hook", "_register_builtin_comm_hook"):
                patches.put(DistributedDataParallel, name, self._registering)
        if not self._left_out.synchronised_batch_norm:
            patches.put(nn.SyncBatchNorm, "forward", lambda _usual: _BatchNorm.forward)

    def _constructing_ddp(self, usual: Any) -> Any:
        def construct(module: Any, /, *args: Any, **kwargs: Any) -> None:
            given = SIGNATURE.bind(module, *args, **kwargs)
            given.arguments.update(self._changes(given.arguments))
            usual(*given.args, **given.kwargs)
            self.ddp.append(module)
            self._made()
            if self._left_out.exchange != "real":
                hook = DDP_HOOKS[self._left_out.exchange]
                HOOK(module, None, hook)

        return construct

    def _changes(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments that an experiment sets.

        Where unused parameters are looked for, ranks exchange which they are in every backward,
        whatever the hook: without an exchange they do so in a group of one.
        """
        alone = self._left_out.exchange == "none"
        changed: dict[str, Any] = {}
        if alone or not self._left_out.buffers:
            for name in OTHER_NAME:
                given.pop(name, None)
            changed |= WITHOUT_BUFFERS
        if alone and given.get("find_unused_parameters"):
            changed["process_group"] = _own_group()
        return changed

    def _constructing_dp(self, usual: Any) -> Any:
        def construct(module: Any, /, *args: Any, **kwargs: Any) -> None:
            usual(module, *args, **kwargs)
            self.dp.append(module)
            self._made()

        return construct

    def _registering(self, _usual: Any) -> Any:
        """The script's own hook is not registered: nothing is exchanged that it could change."""
        return lambda *_args, **_kwargs: None


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


def buffers_of(wrapped: Any) -> list[torch.Tensor]:
    """The buffers that a DDP broadcasts before a forward."""
    return list(getattr(wrapped, "modules_buffers", ()))


def broadcasts_buffers(wrapped: Any) -> bool:
    """Whether it does."""
    return any(bool(getattr(wrapped, name, False)) for name in OTHER_NAME)
