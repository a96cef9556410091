"""Trainers that a script makes: which, on which line; those told a number of devices get ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nfold.frameworks.imports import Action
from nfold.place import place_here
from nfold.seen import Trainer

MADE = {
    "transformers.training_args": ("TrainingArguments", "__post_init__", "transformers"),
    "lightning.pytorch.trainer.trainer": ("Trainer", "__init__", "lightning"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "__init__", "lightning"),
    "lightning.fabric.fabric": ("Fabric", "__init__", "fabric"),
    "lightning_fabric.fabric": ("Fabric", "__init__", "fabric"),
    "accelerate.accelerator": ("Accelerator", "__init__", "accelerate"),
}
"""By the module that defines it: the class that takes the settings, what makes one, whose it is."""
COUNTING = ("lightning", "fabric")
"""Those that are told a number of devices in the script."""
OUTER: tuple[Trainer, ...] = ("transformers", "lightning", "fabric", "accelerate")
"""An earlier one may use a later one."""


class Trainers:
    """Those that a script has made so far.

    ``world_size`` is how many devices each is told to use, whatever the script says: ``devices=2``
    in a script that runs on one device alone is refused by Lightning.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._places: dict[str, str | None] = {}

    def actions(self) -> dict[str, Action]:
        """What to do after the import of each module that defines one."""
        return dict.fromkeys(MADE, self._adapt)

    @property
    def used(self) -> Trainer:
        """The outermost that the script has made, empty without one."""
        return next((name for name in OUTER if name in self._places), "")

    @property
    def place(self) -> str | None:
        """Where in the user's code it was first made, None where that is not known."""
        return self._places.get(self.used)

    def _adapt(self, module: ModuleType) -> None:
        name, method, whose = MADE[module.__name__]
        owner = getattr(module, name)
        told = {"devices": self._world_size, "num_nodes": 1} if whose in COUNTING else {}
        setattr(owner, method, self._noting(getattr(owner, method), whose, told))

    def _noting(
        self, usual: Callable[..., Any], whose: str, told: dict[str, int]
    ) -> Callable[..., Any]:
        @functools.wraps(usual)
        def make(made: Any, *args: Any, **kwargs: Any) -> Any:
            self._places.setdefault(whose, place_here())
            return usual(made, *args, **{**kwargs, **told})

        return make
