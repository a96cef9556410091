"""One optimizer update of a built-in workload, as the plan's ``step`` says.

``eager`` runs it as it is written; ``compiled`` compiles forward and backward; ``captured``
replays the whole of it as one CUDA graph: selection of the samples, augmentation, forward,
backward, exchange, optimizer; ``compiled+captured`` does both. Under gradient accumulation an
update goes through the parts of its batch, and a graph holds all of them.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

import torch
from torch import Tensor

from nfold.errors import UsageError
from nfold.frameworks.torch.batch import Tensors
from nfold.frameworks.torch.capture import Captured, CudaRecorder, NotCaptured
from nfold.frameworks.torch.forward import Forward
from nfold.frameworks.torch.parallel import Turn
from nfold.frameworks.torch.parts import Part, Parts
from nfold.frameworks.torch.precision import Precision
from nfold.place import user_place


class Step(Protocol):
    """Makes one update; returns the mean loss over this rank's samples, not yet read."""

    def __call__(self, tensors: Tensors, epoch: Tensor, parts: Parts) -> Tensor:
        """``tensors`` of a batch, its epoch, int64 [], and the parts to compute it in."""

    def graph_bytes(self) -> int:
        """Memory of the device that recorded graphs keep for themselves."""

    def close(self) -> None:
        """Leave nothing on the device that would keep the process group from ending."""


class Update:
    """Forward, loss and backward of every part, the exchange in the last one's, optimizer.

    Parts of any other than the ``usual_sizes``, those of the last batch of an epoch, go through
    ``rare``: compiling again for one batch an epoch would take longer than it saves.
    """

    def __init__(
        self,
        usual: Forward,
        rare: Forward,
        usual_sizes: Container[int],
        precision: Precision,
        optimizer: torch.optim.Optimizer,
        turn: Turn,
    ) -> None:
        self._usual, self._rare, self._usual_sizes = usual, rare, usual_sizes
        self._precision = precision
        self._optimizer = optimizer
        self._turn = turn

    def __call__(self, tensors: Tensors, epoch: Tensor, parts: Parts) -> Tensor:
        """Make the update."""
        first, *others = [self._add(tensors, epoch, part) for part in parts]
        self._precision.step(self._optimizer)
        return sum(others, first)

    def _add(self, tensors: Tensors, epoch: Tensor, part: Part) -> Tensor:
        """Add a part's gradients; returns what it adds to the mean loss."""
        forward = self._usual if part.rows in self._usual_sizes else self._rare
        with self._turn(part.share):
            loss = forward(part.of(tensors), epoch)
            self._precision.backward(_times(loss, part.of_gradient))
        return _times(loss.detach(), part.of_loss)

    def graph_bytes(self) -> int:
        """There are no graphs."""
        return 0

    def close(self) -> None:
        """Nothing is kept."""


def _times(loss: Tensor, weight: float) -> Tensor:
    return loss if weight == 1 else loss * weight


class CapturedUpdate:
    """An update that is replayed: a graph for every number of samples and their parts."""

    def __init__(self, update: Update, device: torch.device) -> None:
        def flat(*given: Tensor | Parts) -> Tensor:
            *tensors, epoch, parts = given
            return update(tuple(tensors), epoch, parts)  # type: ignore[arg-type]  # as packed below

        self._recorder = CudaRecorder(device)
        self._captured = Captured(flat, self._recorder)

    def __call__(self, tensors: Tensors, epoch: Tensor, parts: Parts) -> Tensor:
        """Make the update, or record it first."""
        try:
            loss: Tensor = self._captured((*tensors, epoch), parts)
        except NotCaptured as failed:
            raise _not_captured(failed.__cause__) from failed
        return loss

    def graph_bytes(self) -> int:
        """What the graphs' pool holds."""
        return self._recorder.pool_bytes()

    def close(self) -> None:
        """Reset the graphs."""
        self._captured.close()


def _not_captured(cause: BaseException | None) -> UsageError:
    reason = str(cause).strip().split("\n")[0] or type(cause).__name__
    place = user_place(cause) if cause else None
    where = f" ({place})" if place else ""
    return UsageError(
        f"the step cannot be captured as a CUDA graph: {reason}{where}; next: --step eager"
    )


def step(plan_step: str, update: Update, device: torch.device) -> Step:
    """The update as the plan's ``step`` runs it."""
    return CapturedUpdate(update, device) if "captured" in plan_step else update


class Now:
    """The epoch as a tensor on the device: made once an epoch, filled there, so nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._epoch = -1
        self._tensor = torch.empty(0)

    def __call__(self, epoch: int | Tensor) -> Tensor:
        """int64 [] of an epoch."""
        if isinstance(epoch, Tensor):
            return epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._tensor = torch.full((), epoch, dtype=torch.int64, device=self._device)
        return self._tensor
