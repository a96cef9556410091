"""From what a batch gives to its loss: as it is written, or compiled by TorchInductor.

A compiled function hands all its gradients over at once, when its backward ends. So that the
exchange of most of them runs beside the rest of backward, a model on several devices is compiled
in pieces, cut where its parameters lie: the gradients of the last piece come first.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nfold.frameworks.base import Task
from nfold.frameworks.torch.batch import Given, Tensors
from nfold.frameworks.torch.precision import Precision
from nfold.frameworks.torch.source import Prepare

Forward = Callable[[Tensors, Tensor], Tensor]
"""A batch's tensors and its epoch, int64 [], to the mean loss, float [] with its graph."""
Pieces = tuple[nn.Module, ...]
TOGETHER: dict[str, Any] = {"combo_kernels": True}
"""Small kernels that do not depend on each other become one: 4 % of a step of cnn10 at 128."""
SEARCHED: dict[str, Any] = {"coordinate_descent_tuning": True, "max_autotune_pointwise": True}
CUTS = (0.05, 0.25)
"""Parts of the parameters' bytes that the first piece, and the first two, may have at most: the
exchange of the first piece is not hidden, that of the second one by the first one's backward."""


@dataclass(frozen=True)
class Way:
    """What lies between a batch and its loss."""

    unpack: Callable[[Tensors], Given]
    prepare: Prepare
    loss: Callable[[Tensor, Tensor], Tensor]
    precision: Precision

    def enter(self, model: nn.Module, tensors: Tensors, epoch: Tensor) -> tuple[Tensor, Tensor]:
        """What ``model`` makes of the samples, and their labels."""
        samples = self.unpack(tensors)
        images = self.prepare(samples, epoch)
        with self.precision.forward():
            return model(images), samples.labels

    def pass_on(self, model: nn.Module, inner: Tensor) -> Tensor:
        """What a piece between the first and the last makes of what came before it."""
        with self.precision.forward():
            result: Tensor = model(inner)
            return result

    def leave(self, model: nn.Module, inner: Tensor, labels: Tensor) -> Tensor:
        """The loss, after the last piece of a model."""
        with self.precision.forward():
            return self.loss(model(inner), labels)


def written(way: Way, model: nn.Module) -> Forward:
    """The model and the loss as their authors wrote them."""

    def forward(tensors: Tensors, epoch: Tensor) -> Tensor:
        outputs, labels = way.enter(model, tensors, epoch)
        with way.precision.forward():
            return way.loss(outputs, labels)

    return forward


def compiled(way: Way, pieces: Pieces, *, tuned: bool) -> Forward:
    """The same in one compiled function, or in one for every piece of the model.

    ``tuned`` searches for the fastest form of every generated kernel on this device, which takes
    tens of seconds; TorchInductor keeps what it found on disk.
    """
    options = {**TOGETHER, **SEARCHED} if tuned else TOGETHER
    if len(pieces) == 1:
        return torch.compile(written(way, pieces[0]), dynamic=False, options=options)
    enter = torch.compile(way.enter, dynamic=False, options=options)
    pass_on = torch.compile(way.pass_on, dynamic=False, options=options)
    leave = torch.compile(way.leave, dynamic=False, options=options)
    first, *between, last = pieces

    def forward(tensors: Tensors, epoch: Tensor) -> Tensor:
        inner, labels = enter(first, tensors, epoch)
        for piece in between:
            inner = pass_on(piece, inner)
        result: Tensor = leave(last, inner, labels)
        return result

    return forward


def pieces_of(module: nn.Module, task: Task) -> Pieces:
    """The module in one piece, or in several for a plan that compiles on several devices.

    Only a plain ``nn.Sequential`` can be cut: of any other module nobody knows what happens
    between its children.
    """
    whole = task.world_size == 1 or "compiled" not in (task.plan.step or "")
    if whole or type(module) is not nn.Sequential:
        return (module,)
    upto = [0, *itertools.accumulate(_bytes(child) for child in module)]
    places = [bisect.bisect_right(upto, part * upto[-1]) - 1 for part in CUTS]
    ends = sorted({0, *(place for place in places if upto[place]), len(module)})
    if len(ends) == 2:
        return (module,)
    return tuple(module[first:last] for first, last in itertools.pairwise(ends))


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
