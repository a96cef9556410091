"""One optimizer update of a built-in workload, as the plan's ``step`` says.

``eager`` runs it as it is written; ``compiled`` compiles forward and backward; ``captured``
replays the whole of it as one CUDA graph: selection of the samples, augmentation, forward,
backward, exchange, optimizer; ``compiled+captured`` does both.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nfold.errors import UsageError
from nfold.frameworks.torch.batch import Tensors
from nfold.frameworks.torch.capture import Captured, CudaRecorder, NotCaptured
from nfold.frameworks.torch.forward import Forward
from nfold.frameworks.torch.precision import Precision
from nfold.place import user_place


class Step(Protocol):
    """Makes one update; returns the mean loss over this rank's samples, not yet read."""

    def __call__(self, tensors: Tensors, epoch: Tensor, weight: float) -> Tensor:
        """``tensors`` of a batch, its epoch, int64 [], and what its mean loss counts for."""

    def close(self) -> None:
        """Leave nothing on the device that would keep the process group from ending."""


class Update:
    """Forward, loss, backward with the exchange in it, optimizer.

    Batches of any other than the ``usual`` number of samples, the last of an epoch, go through
    ``rare``: compiling again for one batch an epoch would take longer than it saves.
    """

    def __init__(
        self,
        usual: Forward,
        rare: Forward,
        samples: int,
        precision: Precision,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._usual, self._rare, self._samples = usual, rare, samples
        self._precision = precision
        self._optimizer = optimizer

    def __call__(self, tensors: Tensors, epoch: Tensor, weight: float) -> Tensor:
        """Make the update."""
        forward = self._usual if len(tensors[0]) == self._samples else self._rare
        loss = forward(tensors, epoch)
        self._precision.update(loss if weight == 1 else loss * weight, self._optimizer)
        return loss.detach()

    def close(self) -> None:
        """Nothing is kept."""


class CapturedUpdate:
    """An update that is replayed: a graph for every number of samples and weight."""

    def __init__(self, update: Update, device: torch.device) -> None:
        def flat(*given: Tensor | float) -> Tensor:
            *tensors, epoch, weight = given
            return update(tuple(tensors), epoch, weight)  # type: ignore[arg-type]  # as packed below

        self._captured = Captured(flat, CudaRecorder(device))

    def __call__(self, tensors: Tensors, epoch: Tensor, weight: float) -> Tensor:
        """Make the update, or record it first."""
        try:
            loss: Tensor = self._captured((*tensors, epoch), weight)
        except NotCaptured as failed:
            raise _not_captured(failed.__cause__) from failed
        return loss

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
