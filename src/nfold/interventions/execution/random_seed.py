"""Seed the random numbers of a script, so that two runs can be compared by their losses."""

from __future__ import annotations

import random
from typing import Any

from nfold.interventions.intervention import TorchSetting


class RandomSeed(TorchSetting[int | None]):
    """The seed of Python, NumPy and PyTorch before the script sets its own; None: as it is."""

    default = None
    is_observation = True
    refused_in_workloads = "the plan sets the seed"

    def read(self, torch: Any) -> Any:
        return torch.initial_seed()

    def write(self, torch: Any, setting: Any) -> None:
        import numpy as np

        random.seed(setting)
        np.random.seed(setting % 2**32)  # what scripts use without a generator
        torch.manual_seed(setting)
