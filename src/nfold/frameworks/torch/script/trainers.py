"""Trainers that are told a number of devices in the script, given the number of ranks instead."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from nfold.frameworks.imports import Action

CLASSES = {
    "lightning.pytorch.trainer.trainer": "Trainer",
    "pytorch_lightning.trainer.trainer": "Trainer",
    "lightning.fabric.fabric": "Fabric",
    "lightning_fabric.fabric": "Fabric",
}
"""Lightning's, by the module that defines each."""


def adapted(world_size: int) -> dict[str, Action]:
    """What to do after the import of each module that defines a trainer."""

    def adapt(module: ModuleType) -> None:
        trainer = getattr(module, CLASSES[module.__name__])
        trainer.__init__ = with_devices(trainer.__init__, world_size)

    return dict.fromkeys(CLASSES, adapt)


def with_devices(construct: Any, world_size: int) -> Any:
    """A constructor whose ``devices``, whatever the script says, are as many as the ranks.

    ``devices=2`` in a script that runs on one device alone is refused by Lightning.
    """

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **{**kwargs, "devices": world_size, "num_nodes": 1})

    return constructed
