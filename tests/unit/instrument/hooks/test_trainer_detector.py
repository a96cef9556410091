"""Trainers that a script makes: seen from outside, and given the number of ranks."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nfold.core.source_location import display_path
from nfold.instrument.hooks.patches import TRAINER_CLASSES, Patches, TrainerDetector

SOURCE = """
class Made:
    def __init__(self, **told):
        self.told = told
        self.__post_init__()

    def __post_init__(self):
        pass
"""
"""Nobody's file, as an installed package's is not the user's."""


def defined(trainers: TrainerDetector, name: str) -> Any:
    """The class of a module that was just imported."""
    module = ModuleType(name)
    exec(compile(SOURCE, "<made>", "exec"), vars(module))
    owner: Any = vars(module)["Made"]
    setattr(module, TRAINER_CLASSES[name][0], owner)
    trainers.import_actions(Patches())[name](module)
    return owner


def test_trainer_is_recorded_with_its_line() -> None:
    trainers = TrainerDetector(2)
    assert (trainers.used, trainers.creation_line) == ("", None)
    owner = defined(trainers, "transformers.training_args")
    assert owner(dataloader_num_workers=3).told == {"dataloader_num_workers": 3}
    owner()
    assert trainers.used == "transformers"
    where, _, line = str(trainers.creation_line).partition(":")
    assert where == display_path(__file__)
    assert "owner(dataloader" in Path(__file__).read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize("name", [name for name in TRAINER_CLASSES if "lightning" in name])
def test_lightning_gets_one_device_per_rank(name: str) -> None:
    owner = defined(TrainerDetector(1), name)
    assert owner(devices=2, num_nodes=3, lr=1).told == {"devices": 1, "num_nodes": 1, "lr": 1}


def test_outermost_trainer_is_used() -> None:
    """Hugging Face's makes an Accelerator of its own."""
    found, trainers = [], TrainerDetector(1)
    for name in ("accelerate.accelerator", "transformers.training_args"):
        defined(trainers, name)()
        found.append(trainers.used)
    assert found == ["accelerate", "transformers"]
