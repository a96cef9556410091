"""One optimizer update of a built-in workload, as the plan's ``step`` says.

``eager`` runs it as it is written; ``compiled`` compiles forward and backward; ``captured``
replays the whole of it as one CUDA graph: selection of the samples, augmentation, forward,
backward, exchange, optimizer; ``compiled+captured`` does both. Under gradient accumulation an
update goes through the parts of its batch, and a graph holds all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nfold.ablation import NOTHING
from nfold.errors import UsageError
from nfold.frameworks.torch.batch import Tensors
from nfold.frameworks.torch.capture import Captured, CudaRecorder, NotCaptured
from nfold.frameworks.torch.forward import Forward
from nfold.frameworks.torch.parallel import Turn
from nfold.frameworks.torch.parts import Part, Parts
from nfold.frameworks.torch.precision import Precision
from nfold.frameworks.torch.rate import Fixed
from nfold.place import user_place
from nfold.turns import exchanged


class Step(Protocol):
    """Makes one update; returns the mean loss over this rank's samples, not yet read."""

    def __call__(self, tensors: Tensors, epoch: Tensor, parts: Parts) -> Tensor:
        """``tensors`` of a batch, its epoch, int64 [], and the parts to compute it in."""

    def several(
        self, tensors: Sequence[Tensors], epoch: Tensor, parts: Parts, rates: Tensor
    ) -> Tensor:
        """One update for each batch, which are alike; ``rates`` are ``Fixed.of``; losses [n]."""

    def switch(self, exchange: Hashable) -> None:
        """From the next update on something else is exchanged; before the first one, as usual."""

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
        rate: Fixed,
    ) -> None:
        self._usual, self._rare, self._usual_sizes = usual, rare, usual_sizes
        self._precision = precision
        self._optimizer = optimizer
        self._turn = turn
        self._rate = rate

    def __call__(self, tensors: Tensors, epoch: Tensor, parts: Parts) -> Tensor:
        """Make the update."""
        first, *others = [self._add(tensors, epoch, part) for part in parts]
        self._precision.step(self._optimizer)
        return sum(others, first)

    def several(
        self, tensors: Sequence[Tensors], epoch: Tensor, parts: Parts, rates: Tensor
    ) -> Tensor:
        """Make the updates one after the other."""
        return one_by_one(self, self._rate, tensors, epoch, parts, rates)

    def _add(self, tensors: Tensors, epoch: Tensor, part: Part) -> Tensor:
        """Add a part's gradients; returns what it adds to the mean loss."""
        forward = self._usual if part.rows in self._usual_sizes else self._rare
        with self._turn(part.share):
            loss = forward(part.of(tensors), epoch)
            self._precision.backward(_times(loss, part.of_gradient))
        return _times(loss.detach(), part.of_loss)

    def switch(self, exchange: Hashable) -> None:
        """Nothing is recorded: whoever exchanges knows."""

    def graph_bytes(self) -> int:
        """There are no graphs."""
        return 0

    def close(self) -> None:
        """Nothing is kept."""


def one_by_one(
    update: Callable[[Tensors, Tensor, Parts], Tensor],
    rate: Fixed,
    tensors: Sequence[Tensors],
    epoch: Tensor,
    parts: Parts,
    rates: Tensor,
) -> Tensor:
    """An update for each batch, at its own rate; their losses [n]."""
    losses = []
    for number, one in enumerate(tensors):
        rate.take(rates, number)
        losses.append(update(one, epoch, parts))
    return torch.stack(losses)


def _times(loss: Tensor, weight: float) -> Tensor:
    return loss if weight == 1 else loss * weight


class CapturedUpdate:
    """An update that is replayed: a graph for every number of samples and their parts.

    Where what is exchanged switches, there are as many of each. All share the recorder's memory:
    of them, too, no two run at once.
    """

    def __init__(self, update: Update, rate: Fixed, recorder: CudaRecorder) -> None:
        def flat(*given: Tensor | Parts) -> Tensor:
            *tensors, epoch, parts = given
            return update(tuple(tensors), epoch, parts)  # type: ignore[arg-type]  # as packed below

        def chained(*given: Tensor | Parts | int) -> Tensor:
            *flat, epoch, rates, parts, n = given
            each = len(flat) // n  # type: ignore[operator]  # as packed below
            tensors = [tuple(flat[k : k + each]) for k in range(0, len(flat), each)]
            return update.several(tensors, epoch, parts, rates)  # type: ignore[arg-type]

        self._rate = rate
        self._recorder = recorder
        self._flat, self._several = flat, chained
        self._of: dict[Hashable, tuple[Captured, Captured]] = {}
        self.switch(exchanged(NOTHING))

    def __call__(self, tensors: Tensors, epoch: Tensor, parts: Parts) -> Tensor:
        """Make the update, or record it first."""
        return _recorded(self._captured, (*tensors, epoch), parts)

    def several(
        self, tensors: Sequence[Tensors], epoch: Tensor, parts: Parts, rates: Tensor
    ) -> Tensor:
        """Make the updates in one graph, or one by one until single ones have warmed up."""
        if not self._captured.warm((*tensors[0], epoch), parts):
            return one_by_one(self, self._rate, tensors, epoch, parts, rates)
        flat = [tensor for one in tensors for tensor in one]
        return _recorded(self._chained, (*flat, epoch, rates), parts, len(tensors))

    def switch(self, exchange: Hashable) -> None:
        """Take the graphs of what is exchanged now; none, before the first updates with it."""
        if exchange not in self._of:
            several = Captured(self._several, self._recorder, warm_up=0)
            self._of[exchange] = Captured(self._flat, self._recorder), several
        self._captured, self._chained = self._of[exchange]

    def graph_bytes(self) -> int:
        """What the graphs' pool holds."""
        return self._recorder.pool_bytes()

    def close(self) -> None:
        """Reset the graphs."""
        for captured, chained in self._of.values():
            captured.close()
            chained.close()


def _recorded(captured: Captured, tensors: Tensors, *constants: Hashable) -> Tensor:
    try:
        losses: Tensor = captured(tensors, *constants)
    except NotCaptured as failed:
        raise _not_captured(failed.__cause__) from failed
    return losses


def _not_captured(cause: BaseException | None) -> UsageError:
    reason = str(cause).strip().split("\n")[0] or type(cause).__name__
    place = user_place(cause) if cause else None
    where = f" ({place})" if place else ""
    return UsageError(
        f"the step cannot be captured as a CUDA graph: {reason}{where}; next: --step eager"
    )


def step(plan_step: str, update: Update, rate: Fixed, device: torch.device) -> Step:
    """The update as the plan's ``step`` runs it."""
    return CapturedUpdate(update, rate, CudaRecorder(device)) if "captured" in plan_step else update


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
