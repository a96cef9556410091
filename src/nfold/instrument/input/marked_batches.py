"""The batches of ``nfold.batches``, as a DataLoader of a script."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from nfold.core.source_location import current_user_line, user_stack
from nfold.instrument.input.epoch_passes import CREATION_LINES_ATTRIBUTE

CALL_NAME = "nfold.batches"


class MarkedBatches:
    """An iterable of batches with the attributes of a DataLoader that nfold reads.

    The batch size, the samplers and the workers are unknown. Other attributes are those of the
    iterable. ``iterate`` is called for each pass.
    """

    batch_size = sampler = batch_sampler = prefetch_factor = None
    num_workers = timeout = 0

    def __init__(self, iterable: Iterable[Any], iterate: Callable[[Any], Iterator[Any]]) -> None:
        self.dataset = iterable
        self.marked_at = current_user_line() or ""
        self.on_device = False  # whether the batches are on a device
        self._iterate = iterate
        vars(self)[CREATION_LINES_ATTRIBUTE] = user_stack()

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class NestedLoaders:
    """Tells whether a marked iterable is making a batch: a DataLoader inside it is a part of it."""

    def __init__(self) -> None:
        self.active = False

    @contextmanager
    def _activated(self) -> Generator[None]:
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    def iterate(self, marked: MarkedBatches) -> Iterator[Any]:
        """Iterate over the iterable of ``marked``."""
        with self._activated():
            source = iter(marked.dataset)
        while True:
            with self._activated():
                try:
                    batch = next(source)
                except StopIteration:
                    return
            yield batch
