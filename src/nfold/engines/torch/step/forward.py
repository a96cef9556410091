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

from nfold.engines.base import Task
from nfold.engines.torch.batch import InputSamples, Tensors
from nfold.engines.torch.input.batch_source import PrepareInput
from nfold.engines.torch.precision import Precision

Forward = Callable[[Tensors, Tensor], Tensor]
"""A batch's tensors and its epoch, int64 [], to the mean loss, float [] with its graph."""
Pieces = tuple[nn.Module, ...]
FUSION_OPTIONS: dict[str, Any] = {"combo_kernels": True}
"""Small kernels that do not depend on each other become one: 4 % of a step of cnn10 at 128."""
TUNING_OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True, "max_autotune_pointwise": True}
PIECE_FRACTIONS = (0.05, 0.25)
"""Parts of the parameters' bytes that the first piece, and the first two, may have at most: the
exchange of the first piece is not hidden, that of the second one by the first one's backward."""


@dataclass(frozen=True)
class ForwardPass:
    """What lies between a batch and its loss."""

    unpack: Callable[[Tensors], InputSamples]
    prepare: PrepareInput
    loss: Callable[[Tensor, Tensor], Tensor]
    precision: Precision

    def run_first_piece(
        self, model: nn.Module, tensors: Tensors, epoch: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What ``model`` makes of the samples, and their labels."""
        samples = self.unpack(tensors)
        images = self.prepare(samples, epoch)
        with self.precision.forward():
            return model(images), samples.labels

    def run_middle_piece(self, model: nn.Module, inner: Tensor) -> Tensor:
        """What a piece between the first and the last makes of what came before it."""
        with self.precision.forward():
            result: Tensor = model(inner)
            return result

    def run_last_piece(self, model: nn.Module, inner: Tensor, labels: Tensor) -> Tensor:
        """The loss, after the last piece of a model."""
        with self.precision.forward():
            return self.loss(model(inner), labels)


def eager_forward(forward_pass: ForwardPass, model: nn.Module) -> Forward:
    """The model and the loss as their authors wrote them."""

    def forward(tensors: Tensors, epoch: Tensor) -> Tensor:
        outputs, labels = forward_pass.run_first_piece(model, tensors, epoch)
        with forward_pass.precision.forward():
            return forward_pass.loss(outputs, labels)

    return forward


def compiled_forward(forward_pass: ForwardPass, pieces: Pieces, *, tuned: bool) -> Forward:
    """The same in one compiled function, or in one for every piece of the model.

    ``tuned`` searches for the fastest form of every generated kernel on this device, which takes
    tens of seconds; TorchInductor keeps what it found on disk.
    """
    options = {**FUSION_OPTIONS, **TUNING_OPTIONS} if tuned else FUSION_OPTIONS
    if len(pieces) == 1:
        return torch.compile(eager_forward(forward_pass, pieces[0]), dynamic=False, options=options)
    enter = torch.compile(forward_pass.run_first_piece, dynamic=False, options=options)
    pass_on = torch.compile(forward_pass.run_middle_piece, dynamic=False, options=options)
    leave = torch.compile(forward_pass.run_last_piece, dynamic=False, options=options)
    first, *between, last = pieces

    def forward(tensors: Tensors, epoch: Tensor) -> Tensor:
        inner, labels = enter(first, tensors, epoch)
        for piece in between:
            inner = pass_on(piece, inner)
        result: Tensor = leave(last, inner, labels)
        return result

    return forward


def split_module(module: nn.Module, task: Task) -> Pieces:
    """The module in one piece, or in several for a plan that compiles on several devices.

    Only a plain ``nn.Sequential`` can be cut: of any other module nobody knows what happens
    between its children.
    """
    whole = task.world_size == 1 or "compiled" not in (task.plan.step or "")
    if whole or type(module) is not nn.Sequential:
        return (module,)
    upto = [0, *itertools.accumulate(_parameter_bytes(child) for child in module)]
    places = [bisect.bisect_right(upto, part * upto[-1]) - 1 for part in PIECE_FRACTIONS]
    ends = sorted({0, *(place for place in places if upto[place]), len(module)})
    if len(ends) == 2:
        return (module,)
    return tuple(module[first:last] for first, last in itertools.pairwise(ends))


def _parameter_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
