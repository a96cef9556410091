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

from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.torch.ablate_exchange import Done
from nfold.frameworks.torch.script.patches import Make, Patches
from nfold.frameworks.torch.script.sparse import size_of
from nfold.frameworks.torch.script.stand_ins import STAND_INS
from nfold.frameworks.torch.script.tally import Tally

ONLY_COUNTED = ("broadcast_object_list", "scatter_object_list", "send", "recv", "isend", "irecv")
"""Left as they are: what they bring is not known to the rank that gets it."""


class Collectives:
    """Stands in for the collectives of ``torch.distributed``.

    ``left_out`` counts from ``begin`` on: before the first step scripts agree on what they do.
    """

    def __init__(self, left_out: LeftOut, tally: Tally) -> None:
        self._left_out = left_out
        self._tally = tally
        self._inside = False
        self._begun = self._goes_on = False
        self._sent = self._steps = self._exchanging = 0

    def install(self, patches: Patches, warm_up: Patches) -> None:
        """Replace the collectives in every module that holds them."""
        where = warm_up if self._left_out.never("exchange") else patches
        self._put(where)
        where.put(Join, "notify_join_context", self._notifying)

    def _put(self, where: Patches) -> None:
        for name in (*STAND_INS, *ONLY_COUNTED):
            usual = getattr(module, name, None)
            if usual is None:
                continue
            stand_in = self._standing_in(usual, name)
            for owner in holders(name, usual):
                where.put(owner, name, _given(stand_in))

    def go_on(self, patches: Patches) -> None:
        """Look after the warm-up, too, where none of its steps has exchanged what is trained."""
        self._goes_on = not self._exchanging
        if self._goes_on and self._left_out.never("exchange"):
            self._put(patches)

    def stepped(self, trained: Callable[[], Iterable[Tensor]]) -> None:
        """A step is made; it may have exchanged most of what is trained, or its gradients."""
        if self._tally.on or self._goes_on:
            self._steps += 1
            self._exchanging += bool(self._sent) and 2 * self._sent >= sum(map(size_of, trained()))
        self._sent = 0

    @property
    def some_only(self) -> tuple[int, int] | None:
        """How many of how many steps have exchanged it, where not all did, and some."""
        counts = self._exchanging, self._steps
        return counts if 0 < self._exchanging < self._steps else None

    def begin(self) -> None:
        """The first step is made: nothing is exchanged any more, where that was asked for."""
        self._begun = True

    @property
    def _off(self) -> bool:
        return self._begun and self._left_out.now.exchange in ("none", "barrier")

    def _notifying(self, usual: Any) -> Any:
        """What waits for this must be PyTorch's own work, or nothing."""

        def notify(joined: Any) -> Any:
            without = self._begun and self._left_out.now.exchange == "none"
            return None if without else usual(joined)

        return notify

    def _standing_in(self, usual: Any, name: str) -> Any:
        signature = inspect.signature(usual)

        @functools.wraps(usual)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return usual(*args, **kwargs)
            if self._tally.on or self._goes_on:
                sent = bytes_of(name, args, kwargs)
                self._sent += sent * (name in STAND_INS)
                self._tally.note("collective", name, sent)
            if name in STAND_INS and self._off and not self._is_one_element(args):
                return self._instead(name, signature.bind(*args, **kwargs))
            self._inside = True
            try:
                return usual(*args, **kwargs)
            finally:
                self._inside = False

        return collective

    def _is_one_element(self, args: tuple[Any, ...]) -> bool:
        """Whether a barrier would exchange just that: then it is the collective itself.

        Some scripts make hundreds of them in a step; whatever we do for each would be in a rung.
        """
        if self._left_out.now.exchange != "barrier" or not args:
            return False
        return isinstance(args[0], Tensor) and args[0].numel() == 1

    def _instead(self, name: str, given: inspect.BoundArguments) -> Any:
        """This rank's part alone; under ``barrier`` with one element exchanged beside it."""
        given.apply_defaults()
        asynchronous = bool(given.arguments.get("async_op"))
        work: Any = Done()
        if self._left_out.now.exchange == "barrier":
            work = one_element(given, asynchronous)
        STAND_INS[name](*given.arguments.values())
        return work if asynchronous else None


def _given(stand_in: Any) -> Make:
    """Whatever stands there, this does from now on."""
    return lambda _usual: stand_in


def holders(name: str, function: Any) -> Iterator[ModuleType]:
    """Yield the modules that hold ``function`` under its own name.

    These are ``torch.distributed``, the module that defines it, and modules that were imported
    before the patch with ``from torch.distributed import ...``.
    """
    for one in list(sys.modules.values()):
        if isinstance(one, ModuleType) and vars(one).get(name) is function:
            yield one


ALL_REDUCE = dist.all_reduce


def one_element(given: inspect.BoundArguments, asynchronous: bool) -> Any:
    """An all-reduce of one element in the same group, on the same device."""
    group = given.arguments.get("group")
    tensors = [value for value in given.arguments.values() if isinstance(value, Tensor)]
    if tensors:
        device = tensors[0].device
    else:
        on_gpu = dist.get_backend(group) != "gloo" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.device("cuda" if on_gpu else "cpu")
    return ALL_REDUCE(torch.zeros(1, device=device), group=group, async_op=asynchronous)


def bytes_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """What one rank gives: of tensors that gather the smaller one, else the larger."""
    sizes = [size_of(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return (min if "gather" in name else max)(sizes, default=0)
