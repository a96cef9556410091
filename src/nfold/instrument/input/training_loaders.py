"""The DataLoaders that provide the batches of training steps."""

from __future__ import annotations

from collections.abc import KeysView
from typing import Any

import torch

from nfold.instrument.input.epoch_passes import (
    full_epoch_length,
    same_creation_line,
    same_dataset,
)
from nfold.instrument.input.fetch_times import WeakIdentityDict


class TrainingLoaders:
    """The DataLoaders that feed the training, and their ``companions``.

    A DataLoader feeds the training if a step followed on one of its batches in the warm-up, or if
    it replaces such a loader: some scripts construct a new one for every epoch.
    """

    def __init__(self) -> None:
        self.companions = CompanionLoaders()
        self._loaders: dict[int, Any] = {}
        self._creation_lines: WeakIdentityDict[str] = WeakIdentityDict()

    @property
    def loader(self) -> Any:
        """The last of the loaders, None without any."""
        return next(reversed(self._loaders.values()), None)

    @property
    def ids(self) -> KeysView[int]:
        return self._loaders.keys()

    def feeds_epochs(self, loader: Any) -> bool:
        """Return whether steps followed on the loader's batches, so that its passes are epochs."""
        return id(loader) in self._loaders

    def feeds_step(self, loader: Any) -> bool:
        """Return whether the loader or companion provides batches of steps."""
        return self.feeds_epochs(loader) or loader in self.companions

    def add(self, loader: Any) -> None:
        """End a step of the warm-up that followed on a batch of the loader."""
        self._loaders[id(loader)] = loader
        self.companions.on_step(self._loaders)

    def predecessor(self, loader: Any, *, same_dataset_only: bool) -> Any:
        """Return the training loader that the same line constructed before, None without one."""
        for old in self._loaders.values():
            if same_creation_line(old, loader) and (
                not same_dataset_only or same_dataset(old, loader)
            ):
                return old
        return None

    def replace(self, loader: Any, replacement: Any) -> None:
        del self._loaders[id(loader)]
        self._loaders[id(replacement)] = replacement

    def end_warm_up(self) -> None:
        """Choose the longest of the loaders of a step: its passes are the epochs."""
        self.companions.end_warm_up()
        current = self.loader
        if current is None:
            return
        longest = max((current, *self.companions.all), key=full_epoch_length)
        if longest in self.companions:
            self.companions.replace(longest, current)
            self.replace(current, longest)

    def record_creation(self, loader: Any, line: str) -> None:
        """Keep the line that constructed the first loader over its dataset."""
        if self._creation_lines.get(loader.dataset) is None:
            self._creation_lines.put(loader.dataset, line)

    def creation_line(self, loader: Any) -> str | None:
        """Return the user line that constructed the first loader over this dataset."""
        return self._creation_lines.get(loader.dataset)


class CompanionLoaders:
    """Loaders that provide a batch in every step besides the loader that counts epochs.

    Semi-supervised training, for example, has labelled and other samples. The shorter loader
    restarts in the middle of an epoch. A companion provides batches in two consecutive steps of the
    warm-up.
    """

    def __init__(self) -> None:
        self._loaders: dict[int, Any] = {}
        self._current_step: dict[int, Any] = {}
        self._previous_step: dict[int, Any] = {}

    def __contains__(self, loader: Any) -> bool:
        return id(loader) in self._loaders

    @property
    def all(self) -> tuple[Any, ...]:
        return tuple(self._loaders.values())

    def record_batch(self, loader: Any) -> None:
        if torch.is_grad_enabled():
            self._current_step[id(loader)] = loader

    def on_step(self, epoch_loaders: Any) -> None:
        """End a step of the warm-up; ``epoch_loaders`` (by id) are no companions."""
        current, previous = self._current_step, self._previous_step
        self._loaders |= {key: loader for key, loader in current.items() if key in previous}
        for key in epoch_loaders:
            self._loaders.pop(key, None)
        self._previous_step, self._current_step = current, {}

    def end_warm_up(self) -> None:
        self._current_step, self._previous_step = {}, {}

    def replace(self, loader: Any, replacement: Any) -> None:
        del self._loaders[id(loader)]
        self._loaders[id(replacement)] = replacement

    def replace_predecessor(self, loader: Any) -> Any:
        """Replace the companion that the same line made for the same dataset, and return it."""
        for old in self.all:
            if same_creation_line(old, loader) and same_dataset(old, loader):
                self.replace(old, loader)
                return old
        return None
