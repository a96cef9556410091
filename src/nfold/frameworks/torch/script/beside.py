"""DataLoaders that give a batch in every step, too, beside the one whose passes are epochs."""

from __future__ import annotations

from typing import Any

import torch

from nfold.frameworks.torch.script.passes import same_data, same_place


class Beside:
    """Those that gave in two steps on end of a warm-up, and what stands in their places later.

    A semi-supervised training has one of labelled and one of other samples; that of fewer batches
    is begun again whenever it ends, in the middle of an epoch.
    """

    def __init__(self) -> None:
        self._loaders: dict[int, Any] = {}
        self._giving: dict[int, Any] = {}
        self._gave_before: dict[int, Any] = {}

    def __contains__(self, loader: Any) -> bool:
        return id(loader) in self._loaders

    @property
    def all(self) -> tuple[Any, ...]:
        """In the order in which they were found."""
        return tuple(self._loaders.values())

    def gave(self, loader: Any) -> None:
        """It gave a batch: to train on, where gradients are computed."""
        if torch.is_grad_enabled():
            self._giving[id(loader)] = loader

    def stepped(self, counted: Any) -> None:
        """A step of the warm-up was made; ``counted`` are known to feed it by themselves."""
        again = {key: one for key, one in self._giving.items() if key in self._gave_before}
        self._loaders |= again
        for key in counted:
            self._loaders.pop(key, None)
        self._gave_before, self._giving = self._giving, {}

    def settle(self) -> None:
        """The warm-up is over: nobody else is one of them."""
        self._giving, self._gave_before = {}, {}

    def swap(self, loader: Any, other: Any) -> None:
        """``other`` stands beside from now on, and ``loader`` no more."""
        del self._loaders[id(loader)]
        self._loaders[id(other)] = other

    def take_over(self, loader: Any) -> Any:
        """Stand in the place of one that the same line has made, which is returned, or None."""
        for old in self.all:
            if same_place(old, loader) and same_data(old, loader):
                self.swap(old, loader)
                return old
        return None
