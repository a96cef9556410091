"""digits with a cost of known size in it: ``nfold explain planted:digits`` on CPU devices.

NFOLD_PLANTED is JSON: ``{"imbalance": 2.0}``, causes and their milliseconds a step. The costs are
put in when a rank calls ``digits``; nfold itself knows nothing of them.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
from torch import nn

import nfold
from nfold import data
from nfold.workloads.digits import torch as digits_torch

ENVIRONMENT = "NFOLD_PLANTED"
SLOW_RANK = 1


def digits() -> nfold.Training:
    """The built-in workload's data, model and optimizer, with the planted cost."""
    arrays = data.load("digits")
    model = digits_torch.model({}, arrays.classes)
    for cause, dose_ms in json.loads(os.environ.get(ENVIRONMENT) or "{}").items():
        _plant(model, cause, dose_ms)
    return nfold.Training(
        model=model,
        train=(arrays.train_images, arrays.train_labels),
        test=(arrays.test_images, arrays.test_labels),
        loss=digits_torch.loss,
        optimizer=lambda made: digits_torch.optimizer(made, {}),
    )


def spin(milliseconds: float) -> None:
    """Keep the core busy, as real work does."""
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        pass


def _plant(model: nn.Module, cause: str, dose_ms: float) -> None:
    if not dose_ms or "RANK" not in os.environ:
        return
    slow = cause == "imbalance" and int(os.environ["RANK"]) == SLOW_RANK
    if slow or cause == "launch-bound":
        model.register_forward_pre_hook(lambda *_: spin(dose_ms))
    elif cause == "input":
        _slow_input(dose_ms)
    elif cause in ("link", "synchronization"):
        _slow_exchange(cause, dose_ms)


def _slow_input(dose_ms: float) -> None:
    """``dose_ms`` for a whole share of 64 samples, in proportion to its samples."""
    from nfold.frameworks.torch.input import Batches

    load = Batches.__getitem__

    def slow(self: Any, key: Any) -> Any:
        spin(dose_ms * key.count / 64)
        return load(self, key)

    Batches.__getitem__ = slow  # type: ignore[method-assign]


def _slow_exchange(cause: str, dose_ms: float) -> None:
    """With every bucket: of ``link`` in the real exchange alone, else with a barrier too."""
    from nfold.frameworks.torch import ablate_exchange

    usual = ablate_exchange.all_reduce
    kinds = ("real",) if cause == "link" else ("real", "barrier")

    def chosen(left_out: Any) -> Any:
        send = usual(left_out)

        def slow(tensor: torch.Tensor, **how: Any) -> Any:
            if left_out.now.exchange in kinds:
                time.sleep(dose_ms / 1e3)
            return send(tensor, **how)

        return slow

    ablate_exchange.all_reduce = chosen
