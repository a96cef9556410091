"""The outputs of a CUDA graph, which its next replay overwrites: copied for the loop, or lent to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nfold.instrument.torch_private import foreach_copy, storage_uses

LENT_NUMBERS = 2**16  # smaller outputs are always copied
RELEASED_COPIES = 3  # that are released before the next call, before an output is lent


class GraphOutputs:
    """Outputs of a graph that a loop gets; ``places`` are their indices in all ``outputs``.

    A large output is copied at first. It is lent if the loop has released its copies before the next
    call, as it does with logits and gradients, and copied again once it did not.
    """

    def __init__(self, outputs: Sequence[Any], places: Collection[int]) -> None:
        self._outputs = outputs
        tensors = {id(one): one for one in outputs if isinstance(one, Tensor)}
        memories = Counter(_memory(one) for one in tensors.values())
        self._own_uses = {k: memories[_memory(outputs[k])] for k in places}
        self._copied = list(places)
        self._copies = {k: ObservedCopy() for k in places if outputs[k].numel() >= LENT_NUMBERS}
        self._lent: set[int] = set()
        self._overdue: set[int] = set()  # were lent and not released before the next call

    def are_released(self) -> bool:
        """Return whether the loop has released what was lent: a replay overwrites it."""
        self._overdue = {k for k in self._lent | self._overdue if self._is_in_use(k)}
        if late := self._overdue & self._lent:
            self._lent -= late
            self._copied += late
        return not self._overdue

    def _is_in_use(self, k: int) -> bool:
        return storage_uses(self._outputs[k]) > self._own_uses[k]

    def lend_released(self) -> None:
        """Lend, from the next replay on, the outputs whose copies were released several times."""
        self._copies = {k: one for k, one in self._copies.items() if one.is_released()}
        if lent := {k for k, one in self._copies.items() if one.released == RELEASED_COPIES}:
            self._copies = {k: one for k, one in self._copies.items() if k not in lent}
            self._lent |= lent
            self._copied = [k for k in self._copied if k not in lent]

    def hand_out(self) -> dict[int, Tensor]:
        """Return the outputs of the last replay for the loop, by their places."""
        handed = {k: self._outputs[k].detach() for k in self._lent}
        if self._copied:
            copies = [torch.empty_like(self._outputs[k]) for k in self._copied]
            foreach_copy(copies, [self._outputs[k] for k in self._copied])
            for k, copy in zip(self._copied, copies, strict=True):
                handed[k] = copy
                if k in self._copies:
                    self._copies[k].observe(copy)
        return handed


class ObservedCopy:
    """The last copy of an output, and how many before it were released in time."""

    def __init__(self) -> None:
        self.released = 0
        self._storage: StorageWeakRef | None = None

    def observe(self, copy: Tensor) -> None:
        self._storage = StorageWeakRef(copy.untyped_storage())  # type: ignore[no-untyped-call]

    def is_released(self) -> bool:
        """Return whether nobody holds the last copy any more."""
        if self._storage is None:
            return True
        self.released += 1
        is_released: bool = self._storage.expired()  # type: ignore[no-untyped-call]
        return is_released


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
