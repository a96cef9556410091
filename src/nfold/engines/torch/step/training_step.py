"""Several steps in one call: consecutive batches of one form, which one graph goes through.

Between two graphs a GPU waits for the copies of what they read and return and for the start of
the second, about 25 µs on an H200; between two steps of one graph it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nfold.core.errors import UsageError
from nfold.core.interleave import communication_key
from nfold.core.source_location import error_location
from nfold.core.variant import NO_INTERVENTIONS
from nfold.engines.torch.batch import Batch, MicroBatch, MicroBatches, Tensors, tensor_signature
from nfold.engines.torch.communication.data_parallel import MicroBatchContext
from nfold.engines.torch.lr_schedule import ConstantLearningRate
from nfold.engines.torch.precision import Precision
from nfold.engines.torch.step.cuda_graph import CapturedFunction, CaptureFailed, CudaGraphRecorder
from nfold.engines.torch.step.forward import Forward

BatchGroup = tuple[Batch, ...]


def group_batches(
    batches: Iterable[Batch], max_group: int, *, single_batches: int = 0
) -> Iterator[BatchGroup]:
    """All batches in their order: the first ``apart`` alone, then ``most`` alike ones at a time.

    Those that have too few alike beside them, such as the last ones of an epoch, come alone.
    """
    held: list[Batch] = []
    for number, batch in enumerate(batches):
        if held and _batch_signature(held[0]) != _batch_signature(batch):
            yield from _flush(held)
        held.append(batch)
        if number < single_batches:
            yield from _flush(held)
        elif len(held) == max_group:
            yield tuple(held)
            held.clear()
    yield from _flush(held)


def _flush(held: list[Batch]) -> Iterator[BatchGroup]:
    yield from ((batch,) for batch in held)
    held.clear()


def _batch_signature(batch: Batch) -> Hashable:
    epoch = id(batch.epoch) if isinstance(batch.epoch, Tensor) else batch.epoch
    return tuple(map(tensor_signature, batch.tensors)), epoch, batch.count, batch.global_count


# One optimizer update of a built-in workload, as the plan's ``step`` says.
#
# ``eager`` runs it as it is written; ``compiled`` compiles forward and backward; ``captured``
# replays the whole of it as one CUDA graph: selection of the samples, augmentation, forward,
# backward, exchange, optimizer; ``compiled+captured`` does both. Under gradient accumulation an
# update goes through the parts of its batch, and a graph holds all of them.


class TrainingStep(Protocol):
    """Makes one update; returns the mean loss over this rank's samples, not yet read."""

    def __call__(self, tensors: Tensors, epoch: Tensor, parts: MicroBatches) -> Tensor:
        """``tensors`` of a batch, its epoch, int64 [], and the parts to compute it in."""

    def run_many(
        self, tensors: Sequence[Tensors], epoch: Tensor, parts: MicroBatches, rates: Tensor
    ) -> Tensor:
        """One update for each batch, which are alike; ``rates`` are ``Fixed.of``; losses [n]."""

    def switch_exchange(self, exchange_key: Hashable) -> None:
        """From the next update on something else is exchanged; before the first one, as usual."""

    def graph_bytes(self) -> int:
        """Memory of the device that recorded graphs keep for themselves."""

    def close(self) -> None:
        """Leave nothing on the device that would keep the process group from ending."""


class EagerStep:
    """Forward, loss and backward of every part, the exchange in the last one's, optimizer.

    Parts of any other than the ``usual_sizes``, those of the last batch of an epoch, go through
    ``rare``: compiling again for one batch an epoch would take longer than it saves.
    """

    def __init__(
        self,
        forward: Forward,
        rare_forward: Forward,
        usual_sizes: Container[int],
        precision: Precision,
        optimizer: torch.optim.Optimizer,
        context: MicroBatchContext,
        lr_schedule: ConstantLearningRate,
    ) -> None:
        self._forward, self._rare_forward, self._usual_sizes = forward, rare_forward, usual_sizes
        self._precision = precision
        self._optimizer = optimizer
        self._context = context
        self._lr_schedule = lr_schedule

    def __call__(self, tensors: Tensors, epoch: Tensor, parts: MicroBatches) -> Tensor:
        first, *others = [self._accumulate(tensors, epoch, part) for part in parts]
        self._precision.step(self._optimizer)
        return sum(others, first)

    def run_many(
        self, tensors: Sequence[Tensors], epoch: Tensor, parts: MicroBatches, rates: Tensor
    ) -> Tensor:
        """Make the updates one after the other."""
        return run_each(self, self._lr_schedule, tensors, epoch, parts, rates)

    def _accumulate(self, tensors: Tensors, epoch: Tensor, part: MicroBatch) -> Tensor:
        forward = self._forward if part.rows in self._usual_sizes else self._rare_forward
        with self._context(part.share):
            loss = forward(part.select_rows(tensors), epoch)
            self._precision.backward(_scale(loss, part.gradient_weight))
        return _scale(loss.detach(), part.loss_weight)

    def switch_exchange(self, exchange_key: Hashable) -> None:
        """Nothing is recorded: whoever exchanges knows."""

    def graph_bytes(self) -> int:
        """There are no graphs."""
        return 0

    def close(self) -> None:
        """Nothing is kept."""


def run_each(
    update: Callable[[Tensors, Tensor, MicroBatches], Tensor],
    lr_schedule: ConstantLearningRate,
    tensors: Sequence[Tensors],
    epoch: Tensor,
    parts: MicroBatches,
    rates: Tensor,
) -> Tensor:
    """An update for each batch, at its own rate; their losses [n]."""
    losses = []
    for number, one in enumerate(tensors):
        lr_schedule.load_rate(rates, number)
        losses.append(update(one, epoch, parts))
    return torch.stack(losses)


def _scale(loss: Tensor, weight: float) -> Tensor:
    return loss if weight == 1 else loss * weight


class GraphedStep:
    """An update that is replayed: a graph for every number of samples and their parts.

    Where what is exchanged switches, there are as many of each. All share the recorder's memory:
    of them, too, no two run at once.
    """

    def __init__(
        self, update: EagerStep, lr_schedule: ConstantLearningRate, recorder: CudaGraphRecorder
    ) -> None:
        def flat(*given: Tensor | MicroBatches) -> Tensor:
            *tensors, epoch, parts = given
            return update(tuple(tensors), epoch, parts)  # type: ignore[arg-type]  # as packed below

        def chained(*given: Tensor | MicroBatches | int) -> Tensor:
            *flat, epoch, rates, parts, n = given
            each = len(flat) // n  # type: ignore[operator]  # as packed below
            tensors = [tuple(flat[k : k + each]) for k in range(0, len(flat), each)]
            return update.run_many(tensors, epoch, parts, rates)  # type: ignore[arg-type]

        self._lr_schedule = lr_schedule
        self._recorder = recorder
        self._flat, self._many = flat, chained
        self._graphs: dict[Hashable, tuple[CapturedFunction, CapturedFunction]] = {}
        self.switch_exchange(communication_key(NO_INTERVENTIONS))

    def __call__(self, tensors: Tensors, epoch: Tensor, parts: MicroBatches) -> Tensor:
        return _call_captured(self._captured, (*tensors, epoch), parts)

    def run_many(
        self, tensors: Sequence[Tensors], epoch: Tensor, parts: MicroBatches, rates: Tensor
    ) -> Tensor:
        """Make the updates in one graph, or one by one until single ones have warmed up."""
        if not self._captured.is_warm((*tensors[0], epoch), parts):
            return run_each(self, self._lr_schedule, tensors, epoch, parts, rates)
        flat = [tensor for one in tensors for tensor in one]
        return _call_captured(self._captured_many, (*flat, epoch, rates), parts, len(tensors))

    def switch_exchange(self, exchange_key: Hashable) -> None:
        """Take the graphs of what is exchanged now; none, before the first updates with it."""
        if exchange_key not in self._graphs:
            several = CapturedFunction(self._many, self._recorder, warm_up=0)
            self._graphs[exchange_key] = CapturedFunction(self._flat, self._recorder), several
        self._captured, self._captured_many = self._graphs[exchange_key]

    def graph_bytes(self) -> int:
        """What the graphs' pool holds."""
        return self._recorder.pool_bytes()

    def close(self) -> None:
        """Reset the graphs."""
        for captured, chained in self._graphs.values():
            captured.close()
            chained.close()


def _call_captured(captured: CapturedFunction, tensors: Tensors, *constants: Hashable) -> Tensor:
    try:
        losses: Tensor = captured(tensors, *constants)
    except CaptureFailed as failed:
        raise _capture_error(failed.__cause__) from failed
    return losses


def _capture_error(cause: BaseException | None) -> UsageError:
    reason = str(cause).strip().split("\n")[0] or type(cause).__name__
    place = error_location(cause) if cause else None
    where = f" ({place})" if place else ""
    return UsageError(
        f"the step cannot be captured as a CUDA graph: {reason}{where}; next: --step eager"
    )


def build_step(
    plan_step: str, update: EagerStep, lr_schedule: ConstantLearningRate, device: torch.device
) -> TrainingStep:
    """The update as the plan's ``step`` runs it."""
    return (
        GraphedStep(update, lr_schedule, CudaGraphRecorder(device))
        if "captured" in plan_step
        else update
    )


class EpochTensor:
    """The epoch as a tensor on the device: made once an epoch, filled there, so nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._epoch = -1
        self._tensor = torch.empty(0)

    def __call__(self, epoch: int | Tensor) -> Tensor:
        if isinstance(epoch, Tensor):
            return epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._tensor = torch.full((), epoch, dtype=torch.int64, device=self._device)
        return self._tensor
