"""A script's own collectives: counted, and left out where an experiment leaves out the exchange."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as module
from torch.distributed.algorithms.join import Join

from nfold.frameworks.left_out import ActiveVariant
from nfold.frameworks.torch.ablate_exchange import CompletedWork
from nfold.frameworks.torch.script.patches import Patches, PatchFactory
from nfold.frameworks.torch.script.sparse import tensor_bytes
from nfold.frameworks.torch.script.stand_ins import LOCAL_COLLECTIVES
from nfold.frameworks.torch.script.tally import EventCounter

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
        """What waits for this must be PyTorch's own work, or nothing."""

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
        """This rank's part alone; under ``barrier`` with one element exchanged beside it."""
        bound.apply_defaults()
        asynchronous = bool(bound.arguments.get("async_op"))
        work: Any = CompletedWork()
        if self._variant.current.exchange == "barrier":
            work = all_reduce_one_element(bound, asynchronous)
        LOCAL_COLLECTIVES[name](*bound.arguments.values())
        return work if asynchronous else None


def _constant_patch(replacement: Any) -> PatchFactory:
    """Whatever stands there, this does from now on."""
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
