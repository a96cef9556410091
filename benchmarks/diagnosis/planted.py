"""digits with a cost of known size in it: ``nfold explain planted:digits`` on CPU devices.

NFOLD_PLANTED is JSON: ``{"imbalance": 2.0}``, causes and their milliseconds a step, or a list of
such objects. Of a list each has a turn of so many steps, and every rank prints what one of them
took. The costs are put in when a rank calls ``digits``; nfold itself knows nothing of them.
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
CAUSES = ("input", "imbalance", "link", "synchronization", "launch-bound")
WARMUP, TIMED = 10, 50
"""Steps of a turn."""
SHARE = 64
"""Samples of a device in a step."""


class Clock:
    """The doses of the present turn; prints what a step took at the end of each."""

    def __init__(self, turns: list[dict[str, float]]) -> None:
        self._turns = turns
        self._turn = 0
        self._begun = 0
        self._began = 0.0

    def dose_ms(self, cause: str) -> float:
        """Of a step now."""
        return self._turns[min(self._turn, len(self._turns) - 1)].get(cause, 0.0)

    def step(self, model: nn.Module) -> None:
        """A step begins."""
        if not model.training or self._turn == len(self._turns):
            return
        now = time.perf_counter()
        if self._begun == WARMUP:
            self._began = now
        if self._begun == WARMUP + TIMED:
            step_ms = (now - self._began) * 1e3 / TIMED
            print(json.dumps({"step_ms": step_ms, "turn": self._turn}), flush=True)
            self._turn, self._begun = self._turn + 1, 0
        self._begun += 1


def digits() -> nfold.Training:
    """The built-in workload's data, model and optimizer, with the planted costs."""
    arrays = data.load("digits")
    model = digits_torch.model({}, arrays.classes)
    told = json.loads(os.environ.get(ENVIRONMENT) or "{}")
    if told and "RANK" in os.environ:
        _plant(model, told if isinstance(told, list) else [told], timed=isinstance(told, list))
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


def _plant(model: nn.Module, turns: list[dict[str, float]], *, timed: bool) -> None:
    asked = {cause for doses in turns for cause in doses}
    if asked - set(CAUSES):
        unknown = sorted(asked - set(CAUSES))[0]
        raise ValueError(f"{ENVIRONMENT} {unknown!r}: allowed are {', '.join(CAUSES)}")
    clock = Clock(turns)
    if timed:
        model.register_forward_pre_hook(lambda model, _: clock.step(model))
    slow = int(os.environ["RANK"]) == SLOW_RANK
    in_forward = asked & {"launch-bound", *(["imbalance"] if slow else [])}
    if in_forward:
        model.register_forward_pre_hook(lambda *_: spin(sum(map(clock.dose_ms, in_forward))))
    if "input" in asked:
        _slow_input(clock)
    if asked & {"link", "synchronization"}:
        _slow_exchange(clock)


def _slow_input(clock: Clock) -> None:
    """The dose for a whole share, in proportion to its samples."""
    from nfold.frameworks.torch.input import Batches

    load = Batches.__getitem__

    def slow(self: Any, key: Any) -> Any:
        spin(clock.dose_ms("input") * key.count / SHARE)
        return load(self, key)

    Batches.__getitem__ = slow  # type: ignore[method-assign]


def _slow_exchange(clock: Clock) -> None:
    """With every bucket: of ``link`` in the real exchange alone, else with a barrier too."""
    from nfold.frameworks.torch import ablate_exchange

    usual = ablate_exchange.all_reduce
    costs = {"real": ("link", "synchronization"), "barrier": ("synchronization",)}

    def chosen(left_out: Any) -> Any:
        send = usual(left_out)

        def slow(tensor: torch.Tensor, **how: Any) -> Any:
            dose_ms = sum(map(clock.dose_ms, costs.get(left_out.now.exchange, ())))
            if dose_ms:
                time.sleep(dose_ms / 1e3)
            return send(tensor, **how)

        return slow

    ablate_exchange.all_reduce = chosen
