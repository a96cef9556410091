"""A built-in workload with a cost of known size in it: ``nfold explain planted:digits``.

``digits`` is for CPU devices, ``pictures`` (cnn10) for GPUs, where doses keep the device busy, not
the host, and steps are launched one by one: a captured step would go on with the doses it was
captured with. PLANTED_COSTS is JSON: ``{"imbalance": 2.0}``, causes and their milliseconds a step,
or a list of such objects. Of a list each has a turn of so many steps, and every rank prints what
one of them took. The costs are put in when a rank calls the function; nfold itself knows nothing
of them.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
from busy import CUDA, busy, spin
from planted_terms import CAUSES, ENVIRONMENT, SETTLING, SHARES, TIMED, WARMUP
from torch import Tensor, nn

import nfold
from nfold import data, workloads

SLOW_RANK = 1


class Clock:
    """The doses of the present turn, after steps without any (turn -1); prints what each took."""

    def __init__(self, turns: list[dict[str, float]], *, timed: bool) -> None:
        self._turns = turns
        self._turn = -1 if timed else 0
        self._begun = 0
        self._began = 0.0

    def dose_ms(self, cause: str) -> float:
        """Of a step now."""
        turn = min(self._turn, len(self._turns) - 1)
        return 0.0 if turn < 0 else self._turns[turn].get(cause, 0.0)

    def step(self, model: nn.Module, device: torch.device) -> None:
        """A step begins on this device."""
        if not model.training or self._turn == len(self._turns):
            return
        if self._turn < 0:
            self._begun += 1
            if self._begun == SETTLING:
                self._turn, self._begun = 0, 0
            return
        if self._begun in (WARMUP, WARMUP + TIMED) and device.type == "cuda":
            torch.cuda.synchronize(device)
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
    return _planted("digits", "digits", workloads.network("digits", "torch"))


def pictures() -> nfold.Training:
    """Those of cnn10 on CIFAR-10, each picture cropped and mirrored."""
    network = workloads.network("cnn10", "torch")
    return _planted("pictures", "cifar10", network, ("crop", 4), ("flip", 0))


def _planted(
    name: str, dataset: str, network: workloads.Network, *augmentation: tuple[str, int]
) -> nfold.Training:
    arrays = data.load(dataset)
    model = network.model({}, arrays.classes)
    told = json.loads(os.environ.get(ENVIRONMENT) or "{}")
    if told and "RANK" in os.environ:
        turns = told if isinstance(told, list) else [told]
        _plant(model, turns, SHARES[name], timed=isinstance(told, list))
    return nfold.Training(
        model=model,
        train=(arrays.train_images, arrays.train_labels),
        test=(arrays.test_images, arrays.test_labels),
        loss=network.loss,
        optimizer=lambda made: network.optimizer(made, {}),
        augmentation=augmentation,
    )


def _plant(model: nn.Module, turns: list[dict[str, float]], share: int, *, timed: bool) -> None:
    asked = {cause for doses in turns for cause in doses}
    if asked - set(CAUSES):
        unknown = sorted(asked - set(CAUSES))[0]
        raise ValueError(f"{ENVIRONMENT} {unknown!r}: allowed are {', '.join(CAUSES)}")
    clock = Clock(turns, timed=timed)
    if timed:
        model.register_forward_pre_hook(lambda model, given: clock.step(model, given[0].device))
    if "launch-bound" in asked:
        model.register_forward_pre_hook(lambda *_: spin(clock.dose_ms("launch-bound")))
    if "imbalance" in asked and int(os.environ["RANK"]) == SLOW_RANK:
        model.register_forward_pre_hook(
            lambda _, given: busy(clock.dose_ms("imbalance"), given[0].device)
        )
    if "input" in asked:
        _slow_input(clock, share)
    if asked & {"link", "synchronization"}:
        _slow_exchange(clock)


def _slow_input(clock: Clock, share: int) -> None:
    """The dose for a whole share, in proportion to its samples."""
    from nfold.engines.torch.input.dataloader import ArrayBatches

    load = ArrayBatches.__getitem__

    def slow(self: Any, key: Any) -> Any:
        spin(clock.dose_ms("input") * key.count / share)
        return load(self, key)

    ArrayBatches.__getitem__ = slow  # type: ignore[method-assign]


def _slow_exchange(clock: Clock) -> None:
    """With every bucket: of ``link`` in the real exchange alone, else with a barrier too."""
    from nfold.engines.torch.communication import gradient_exchange

    usual = gradient_exchange.select_all_reduce
    costs = {"real": ("link", "synchronization"), "barrier": ("synchronization",)}

    def chosen(active_variant: Any) -> Any:
        send = usual(active_variant)

        def slow(tensor: Tensor, **how: Any) -> Any:
            dose_ms = sum(map(clock.dose_ms, costs.get(active_variant.current.exchange, ())))
            if not dose_ms:
                return send(tensor, **how)
            if tensor.is_cuda:
                return _behind(tensor, dose_ms, lambda: send(tensor, **how))
            time.sleep(dose_ms / 1e3)
            return send(tensor, **how)

        return slow

    gradient_exchange.select_all_reduce = chosen


def _behind(tensor: Tensor, dose_ms: float, send: Any) -> Any:
    """Send it when a stream of its own has been busy for so long; backward goes on meanwhile."""
    stream = CUDA.Stream(tensor.device)
    stream.wait_stream(CUDA.current_stream(tensor.device))
    with CUDA.stream(stream):
        busy(dose_ms, tensor.device)
        return send()
