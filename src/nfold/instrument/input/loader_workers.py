"""Sets arguments of the DataLoaders that feed a training, without counting batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from multiprocessing import current_process
from typing import Any

import torch
from torch.utils.data import DataLoader

from nfold.core.source_location import user_stack
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.input.dataloader_hook import (
    batch_size_of,
    set_batch_size,
    set_loader_arguments,
    set_num_workers,
)

SEEN_ATTRIBUTE = "_nfold_workers_set"  # of a DataLoader


class TrainingLoaderSettings:
    """Sets workers, batch size and other arguments before a DataLoader is iterated at first.

    Before the first optimizer step these are the DataLoaders that are iterated with gradients
    enabled; afterwards those that the same calls construct, as for every epoch. ``workers`` and
    ``batch``: None leaves those of the script. ``has_found``: a DataLoader; ``has_set_arguments``: of
    one, all of them.
    """

    def __init__(
        self, workers: int | None, batch: int | None, arguments: Mapping[str, Any]
    ) -> None:
        self._workers, self._batch, self._arguments = workers, batch, arguments
        self._stacks: set[tuple[tuple[str, int], ...]] = set()
        self.has_stepped = False
        self.has_found = self.has_set_arguments = False

    def install(self, patches: Patches) -> None:
        patches.wrap(DataLoader, "__init__", self._construct)
        patches.wrap(DataLoader, "__iter__", self._iterate)

    def _construct(self, original: Any, loader: Any, /, *args: Any, **kwargs: Any) -> None:
        original(loader, *args, **kwargs)
        vars(loader)[SEEN_ATTRIBUTE] = user_stack()

    def _iterate(self, original: Any, loader: Any) -> Iterator[Any]:
        stack = vars(loader).pop(SEEN_ATTRIBUTE, None)
        # A worker process cannot start workers.
        if stack is not None and not current_process().daemon and self._feeds_training(stack):
            self._stacks.add(stack)
            self.has_found = True
            if self._workers is not None and loader.num_workers != self._workers:
                set_num_workers(loader, self._workers)
            if self._batch is not None and batch_size_of(loader) != self._batch:
                set_batch_size(loader, self._batch)
            self.has_set_arguments |= set_loader_arguments(loader, self._arguments)
        iterator: Iterator[Any] = original(loader)
        return iterator

    def _feeds_training(self, stack: tuple[tuple[str, int], ...]) -> bool:
        return stack in self._stacks if self.has_stepped else torch.is_grad_enabled()
