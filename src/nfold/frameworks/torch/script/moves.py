"""What becomes of a batch on its way to the model: what is made of its tensors, and what moves."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from nfold.frameworks.torch.script.batches import tensors_of

SOURCE = "_nfold_source"
"""An attribute of a tensor: the one that it was copied from."""
FAR = 8
"""From a tensor back to the one that it was made of: views and copies."""


def derive(source: Tensor, made: Tensor) -> None:
    """Note what a tensor was copied from, unless gradients go through: those are no batches."""
    if made is not source and not made.requires_grad:
        setattr(made, SOURCE, source)


def origins(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, and those that it is a view or a copy of."""
    found: Any = tensor
    for _ in range(FAR):
        if found is None:
            return
        yield found
        found = getattr(found, SOURCE, None) if found._base is None else found._base


class Moves:
    """Which of a batch's tensors a script takes to a device, in the warm-up.

    Lengths of sequences stay on the host: what packs them reads them there.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._moved: set[int] = set()
        self._tensors = 0

    def given(self, batch: Any) -> None:
        """A batch for the training is there."""
        found = list(tensors_of(batch))
        self._tensors = len(found)
        for place, tensor in enumerate(found):
            self._places[id(tensor)] = (weakref.ref(tensor), place)

    def moved(self, source: Tensor) -> None:
        """A tensor goes to a device."""
        for one in origins(source):
            known, place = self._places.get(id(one), (None, 0))
            if known is not None and known() is one:
                self._moved.add(place)

    @property
    def stay(self) -> tuple[int, ...]:
        """The places of those that do not go, among a batch's tensors; none where none was seen."""
        return tuple(sorted({*range(self._tensors)} - self._moved)) if self._moved else ()
