"""One optimizer update of a built-in workload, as the plan's ``step`` says.

``eager`` runs it as written; ``compiled`` compiles forward and backward; ``captured`` replays all of
it as one CUDA graph: selection of the samples, augmentation, forward, backward, exchange, optimizer;
``compiled+captured`` does both. Under gradient accumulation an update covers the micro-batches of a
batch, and a graph holds all of them. One graph may hold the updates of several consecutive batches:
between two graphs a GPU waits about 25 µs on an H200, between two steps of one graph it does not.
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
from nfold.engines.torch.communication.gradient_exchange import ExchangeWait
from nfold.engines.torch.lr_schedule import ConstantLearningRate
from nfold.engines.torch.precision import Precision
from nfold.engines.torch.step.cuda_graph import CapturedFunction, CaptureFailed, CudaGraphRecorder
from nfold.engines.torch.step.forward import Forward

BatchGroup = tuple[Batch, ...]


def group_batches(
    batches: Iterable[Batch], max_group: int, *, single_batches: int = 0
) -> Iterator[BatchGroup]:
    """Yield all batches in order, in groups of up to ``max_group`` with equal shapes.

    The first ``single_batches`` are groups of one, and so are batches of an incomplete group.
    """
    group: list[Batch] = []
    for number, batch in enumerate(batches):
        if group and _batch_signature(group[0]) != _batch_signature(batch):
            yield from ((single,) for single in group)
            group.clear()
        group.append(batch)
        if number < single_batches or len(group) == max_group:
            yield tuple(group)
            group.clear()
    yield from ((single,) for single in group)


def _batch_signature(batch: Batch) -> Hashable:
    epoch = id(batch.epoch) if isinstance(batch.epoch, Tensor) else batch.epoch
    return tuple(map(tensor_signature, batch.tensors)), epoch, batch.count, batch.global_count


class TrainingStep(Protocol):
    """Makes one update; returns the mean loss over this rank's samples, not read yet."""

    def __call__(self, tensors: Tensors, epoch: Tensor, parts: MicroBatches) -> Tensor:
        """Update on the tensors of a batch, its epoch int64 [] and its micro-batches."""

    def run_many(
        self, tensors: Sequence[Tensors], epoch: Tensor, parts: MicroBatches, rates: Tensor
    ) -> Tensor:
        """Update on each of several equal batches, with ``rates`` of ``step_rates``; losses [n]."""

    def switch_exchange(self, exchange_key: Hashable) -> None: ...

    def graph_bytes(self) -> int:
        """Return the device memory that recorded graphs reserve."""

    def close(self) -> None: ...


class EagerStep:
    """Forward, loss and backward of every micro-batch, exchange in the last, optimizer.

    Micro-batches of other than ``usual_sizes``, in the last batch of an epoch, use ``rare_forward``:
    compiling for them would take longer than it saves.
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
        exchange_wait: ExchangeWait,
    ) -> None:
        self._forward, self._rare_forward, self._usual_sizes = forward, rare_forward, usual_sizes
        self._precision = precision
        self._optimizer = optimizer
        self._context = context
        self._lr_schedule = lr_schedule
        self._exchange_wait = exchange_wait

    def __call__(self, tensors: Tensors, epoch: Tensor, parts: MicroBatches) -> Tensor:
        first, *others = [self._accumulate(tensors, epoch, part) for part in parts]
        self._precision.step(self._optimizer)
        return sum(others, first)

    def run_many(
        self, tensors: Sequence[Tensors], epoch: Tensor, parts: MicroBatches, rates: Tensor
    ) -> Tensor:
        return run_each(self, self._lr_schedule, tensors, epoch, parts, rates)

    def _accumulate(self, tensors: Tensors, epoch: Tensor, part: MicroBatch) -> Tensor:
        forward = self._forward if part.rows in self._usual_sizes else self._rare_forward
        with self._context(part.share):
            loss = forward(part.select_rows(tensors), epoch)
            weighted = _scale(loss, part.gradient_weight)
            with self._exchange_wait.measure(weighted):
                self._precision.backward(weighted)
        return _scale(loss.detach(), part.loss_weight)

    def switch_exchange(self, exchange_key: Hashable) -> None:
        pass

    def graph_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


def run_each(
    update: Callable[[Tensors, Tensor, MicroBatches], Tensor],
    lr_schedule: ConstantLearningRate,
    tensors: Sequence[Tensors],
    epoch: Tensor,
    parts: MicroBatches,
    rates: Tensor,
) -> Tensor:
    losses = []
    for number, one in enumerate(tensors):
        lr_schedule.load_rate(rates, number)
        losses.append(update(one, epoch, parts))
    return torch.stack(losses)


def _scale(loss: Tensor, weight: float) -> Tensor:
    return loss if weight == 1 else loss * weight


class GraphedStep:
    """A replayed update: a graph for every number of samples and micro-batches.

    Variants with another exchange have graphs of their own. All share the recorder's memory pool.
    """

    def __init__(
        self, update: EagerStep, lr_schedule: ConstantLearningRate, recorder: CudaGraphRecorder
    ) -> None:
        def run_one(*arguments: Tensor | MicroBatches) -> Tensor:
            *tensors, epoch, parts = arguments
            return update(tuple(tensors), epoch, parts)  # type: ignore[arg-type]  # as packed below

        def run_many(*arguments: Tensor | MicroBatches | int) -> Tensor:
            *flat, epoch, rates, parts, n = arguments
            each = len(flat) // n  # type: ignore[operator]  # as packed below
            tensors = [tuple(flat[k : k + each]) for k in range(0, len(flat), each)]
            return update.run_many(tensors, epoch, parts, rates)  # type: ignore[arg-type]

        self._lr_schedule = lr_schedule
        self._recorder = recorder
        self._run_one, self._run_many = run_one, run_many
        self._graphs: dict[Hashable, tuple[CapturedFunction, CapturedFunction]] = {}
        self.switch_exchange(communication_key(NO_INTERVENTIONS))

    def __call__(self, tensors: Tensors, epoch: Tensor, parts: MicroBatches) -> Tensor:
        return _call_captured(self._captured, (*tensors, epoch), parts)

    def run_many(
        self, tensors: Sequence[Tensors], epoch: Tensor, parts: MicroBatches, rates: Tensor
    ) -> Tensor:
        """Make the updates in one graph; one by one until single updates have warmed up."""
        if not self._captured.is_warm((*tensors[0], epoch), parts):
            return run_each(self, self._lr_schedule, tensors, epoch, parts, rates)
        flat = [tensor for one in tensors for tensor in one]
        return _call_captured(self._captured_many, (*flat, epoch, rates), parts, len(tensors))

    def switch_exchange(self, exchange_key: Hashable) -> None:
        if exchange_key not in self._graphs:
            many = CapturedFunction(self._run_many, self._recorder, warm_up=0)
            self._graphs[exchange_key] = CapturedFunction(self._run_one, self._recorder), many
        self._captured, self._captured_many = self._graphs[exchange_key]

    def graph_bytes(self) -> int:
        return self._recorder.pool_bytes()

    def close(self) -> None:
        for captured, captured_many in self._graphs.values():
            captured.close()
            captured_many.close()


def _call_captured(captured: CapturedFunction, tensors: Tensors, *constants: Hashable) -> Tensor:
    try:
        losses: Tensor = captured(tensors, *constants)
    except CaptureFailed as failed:
        cause = failed.__cause__
        reason = str(cause).strip().split("\n")[0] or type(cause).__name__
        location = error_location(cause) if cause else None
        where = f" ({location})" if location else ""
        raise UsageError(
            f"the step cannot be captured as a CUDA graph: {reason}{where}; next: --step eager"
        ) from failed
    return losses


def build_step(
    plan_step: str, update: EagerStep, lr_schedule: ConstantLearningRate, device: torch.device
) -> TrainingStep:
    if "captured" not in plan_step:
        return update
    return GraphedStep(update, lr_schedule, CudaGraphRecorder(device))


class EpochTensor:
    """The epoch as a tensor on the device, filled there once per epoch, so that nothing waits."""

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
