"""Trainers that a script makes: which, on which line; those told a number of devices get ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nfold.frameworks.imports import ImportCallback
from nfold.place import current_user_line
from nfold.seen import TrainerKind

TRAINER_CLASSES = {
    "transformers.training_args": ("TrainingArguments", "__post_init__", "transformers"),
    "lightning.pytorch.trainer.trainer": ("Trainer", "__init__", "lightning"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "__init__", "lightning"),
    "lightning.fabric.fabric": ("Fabric", "__init__", "fabric"),
    "lightning_fabric.fabric": ("Fabric", "__init__", "fabric"),
    "accelerate.accelerator": ("Accelerator", "__init__", "accelerate"),
}
"""By the module that defines it: the class that takes the settings, what makes one, whose it is."""
WITH_DEVICE_COUNT = ("lightning", "fabric")
"""Those that are told a number of devices in the script."""
OUTERMOST_FIRST: tuple[TrainerKind, ...] = ("transformers", "lightning", "fabric", "accelerate")
"""An earlier one may use a later one."""


class TrainerDetector:
    """Those that a script has made so far.

    ``world_size`` is how many devices each is told to use, whatever the script says: ``devices=2``
    in a script that runs on one device alone is refused by Lightning.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._creation_lines: dict[str, str | None] = {}

    def import_actions(self) -> dict[str, ImportCallback]:
        """What to do after the import of each module that defines one."""
        return dict.fromkeys(TRAINER_CLASSES, self._patch_trainer)

    @property
    def used(self) -> TrainerKind:
        """The outermost that the script has made, empty without one."""
        return next((name for name in OUTERMOST_FIRST if name in self._creation_lines), "")

    @property
    def creation_line(self) -> str | None:
        """Where in the user's code it was first made, None where that is not known."""
        return self._creation_lines.get(self.used)

    def _patch_trainer(self, module: ModuleType) -> None:
        name, method, whose = TRAINER_CLASSES[module.__name__]
        owner = getattr(module, name)
        told = {"devices": self._world_size, "num_nodes": 1} if whose in WITH_DEVICE_COUNT else {}
        setattr(owner, method, self._wrap_init(getattr(owner, method), whose, told))

    def _wrap_init(
        self, original: Callable[..., Any], kind: str, overrides: dict[str, int]
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(made: Any, *args: Any, **kwargs: Any) -> Any:
            self._creation_lines.setdefault(kind, current_user_line())
            return original(made, *args, **{**kwargs, **overrides})

        return make
