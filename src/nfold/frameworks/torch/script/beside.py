"""DataLoaders that give a batch in every step, too, beside the one whose passes are epochs."""

from __future__ import annotations

from typing import Any

import torch

from nfold.frameworks.torch.script.passes import same_creation_line, same_dataset


class CompanionLoaders:
    """Those that gave in two steps on end of a warm-up, and what stands in their places later.

    A semi-supervised training has one of labelled and one of other samples; that of fewer batches
    is begun again whenever it ends, in the middle of an epoch.
    """

    def __init__(self) -> None:
        self._loaders: dict[int, Any] = {}
        self._current_step: dict[int, Any] = {}
        self._previous_step: dict[int, Any] = {}

    def __contains__(self, loader: Any) -> bool:
        return id(loader) in self._loaders

    @property
    def all(self) -> tuple[Any, ...]:
        """In the order in which they were found."""
        return tuple(self._loaders.values())

    def record_batch(self, loader: Any) -> None:
        """It gave a batch: to train on, where gradients are computed."""
        if torch.is_grad_enabled():
            self._current_step[id(loader)] = loader

    def on_step(self, epoch_loaders: Any) -> None:
        """A step of the warm-up was made; ``counted`` are known to feed it by themselves."""
        again = {key: one for key, one in self._current_step.items() if key in self._previous_step}
        self._loaders |= again
        for key in epoch_loaders:
            self._loaders.pop(key, None)
        self._previous_step, self._current_step = self._current_step, {}

    def end_warm_up(self) -> None:
        """The warm-up is over: nobody else is one of them."""
        self._current_step, self._previous_step = {}, {}

    def replace(self, loader: Any, replacement: Any) -> None:
        """``other`` stands beside from now on, and ``loader`` no more."""
        del self._loaders[id(loader)]
        self._loaders[id(replacement)] = replacement

    def replace_predecessor(self, loader: Any) -> Any:
        """Stand in the place of one that the same line has made, which is returned, or None."""
        for old in self.all:
            if same_creation_line(old, loader) and same_dataset(old, loader):
                self.replace(old, loader)
                return old
        return None
