"""From a batch to its loss, eagerly or compiled by TorchInductor.

A compiled function gives all its gradients at the end of its backward. To overlap their exchange
with backward, a model on several devices is compiled in pieces: the gradients of the last piece are
available first.
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

# tensors of a batch, epoch int64 [] -> mean loss [] with its graph
Forward = Callable[[Tensors, Tensor], Tensor]
Pieces = tuple[nn.Module, ...]
# merges independent small kernels: 4 % of a step of cnn10 at 128
FUSION_OPTIONS: dict[str, Any] = {"combo_kernels": True}
TUNING_OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True, "max_autotune_pointwise": True}
# Largest part of the parameters' bytes in the first piece, and in the first two. The exchange of
# the first piece is not hidden; that of the second overlaps with the backward of the first.
PIECE_FRACTIONS = (0.05, 0.25)


@dataclass(frozen=True)
class ForwardPass:
    """The computation between a batch and its loss."""

    unpack: Callable[[Tensors], InputSamples]
    prepare: PrepareInput
    loss: Callable[[Tensor, Tensor], Tensor]
    precision: Precision

    def run_first_piece(
        self, model: nn.Module, tensors: Tensors, epoch: Tensor
    ) -> tuple[Tensor, Tensor]:
        samples = self.unpack(tensors)
        images = self.prepare(samples, epoch)
        with self.precision.forward():
            return model(images), samples.labels

    def run_middle_piece(self, model: nn.Module, hidden: Tensor) -> Tensor:
        with self.precision.forward():
            result: Tensor = model(hidden)
            return result

    def run_last_piece(self, model: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
        with self.precision.forward():
            return self.loss(model(hidden), labels)


def eager_forward(forward_pass: ForwardPass, model: nn.Module) -> Forward:
    def forward(tensors: Tensors, epoch: Tensor) -> Tensor:
        outputs, labels = forward_pass.run_first_piece(model, tensors, epoch)
        with forward_pass.precision.forward():
            return forward_pass.loss(outputs, labels)

    return forward


def compiled_forward(forward_pass: ForwardPass, pieces: Pieces, *, tuned: bool) -> Forward:
    """Return the forward pass as one compiled function, or one for every piece of the model.

    ``tuned`` searches for the fastest variant of every generated kernel on this device, which takes
    tens of seconds; TorchInductor caches the result on disk.
    """
    options = {**FUSION_OPTIONS, **TUNING_OPTIONS} if tuned else FUSION_OPTIONS
    if len(pieces) == 1:
        return torch.compile(eager_forward(forward_pass, pieces[0]), dynamic=False, options=options)
    run_first = torch.compile(forward_pass.run_first_piece, dynamic=False, options=options)
    run_middle = torch.compile(forward_pass.run_middle_piece, dynamic=False, options=options)
    run_last = torch.compile(forward_pass.run_last_piece, dynamic=False, options=options)
    first, *middle, last = pieces

    def forward(tensors: Tensors, epoch: Tensor) -> Tensor:
        hidden, labels = run_first(first, tensors, epoch)
        for piece in middle:
            hidden = run_middle(piece, hidden)
        loss: Tensor = run_last(last, hidden, labels)
        return loss

    return forward


def split_module(module: nn.Module, task: Task) -> Pieces:
    """Return the module in pieces for a plan that compiles on several devices, else whole.

    Only an ``nn.Sequential`` can be cut: other modules may compute between their children.
    """
    whole = task.world_size == 1 or "compiled" not in (task.plan.step or "")
    if whole or type(module) is not nn.Sequential:
        return (module,)
    sizes = (sum(p.nbytes for p in child.parameters()) for child in module)
    upto = [0, *itertools.accumulate(sizes)]
    cuts = [bisect.bisect_right(upto, part * upto[-1]) - 1 for part in PIECE_FRACTIONS]
    ends = sorted({0, *(cut for cut in cuts if upto[cut]), len(module)})
    if len(ends) == 2:
        return (module,)
    return tuple(module[first:last] for first, last in itertools.pairwise(ends))
