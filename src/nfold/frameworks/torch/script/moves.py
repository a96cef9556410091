"""What becomes of a batch on its way to the model: what is made of its tensors, and what moves."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from nfold.frameworks.torch.script.batches import iter_tensors

SOURCE_ATTRIBUTE = "_nfold_source"
"""An attribute of a tensor: the one that it was copied from."""
MAX_ORIGINS = 8
"""From a tensor back to the one that it was made of: views and copies."""


def record_source(source: Tensor, copy: Tensor) -> None:
    """Note what a tensor was copied from, unless gradients go through: those are no batches."""
    if copy is not source and not copy.requires_grad:
        setattr(copy, SOURCE_ATTRIBUTE, source)


def origins(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, and those that it is a view or a copy of."""
    found: Any = tensor
    for _ in range(MAX_ORIGINS):
        if found is None:
            return
        yield found
        found = getattr(found, SOURCE_ATTRIBUTE, None) if found._base is None else found._base


class DeviceTransferTracker:
    """Which of a batch's tensors a script takes to a device, in the warm-up.

    Lengths of sequences stay on the host: what packs them reads them there.
    """

    def __init__(self) -> None:
        self._indices: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._moved_indices: set[int] = set()
        self._tensor_count = 0

    def record_batch(self, batch: Any) -> None:
        """A batch for the training is there."""
        found = list(iter_tensors(batch))
        self._tensor_count = len(found)
        for place, tensor in enumerate(found):
            self._indices[id(tensor)] = (weakref.ref(tensor), place)

    def record_transfer(self, source: Tensor) -> None:
        """A tensor goes to a device."""
        for one in origins(source):
            known, place = self._indices.get(id(one), (None, 0))
            if known is not None and known() is one:
                self._moved_indices.add(place)

    @property
    def host_tensors(self) -> tuple[int, ...]:
        """The places of those that do not go, among a batch's tensors; none where none was seen."""
        return (
            tuple(sorted({*range(self._tensor_count)} - self._moved_indices))
            if self._moved_indices
            else ()
        )
