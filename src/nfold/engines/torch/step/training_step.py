"""One optimizer update of a built-in workload, as the plan's ``step`` says.

``eager`` runs it as written; ``compiled`` compiles forward and backward; ``captured`` replays all of
it as one CUDA graph: selection of the samples, augmentation, forward, backward, exchange, optimizer;
``compiled+captured`` does both. Under gradient accumulation an update covers the micro-batches of a
batch, and a graph holds all of them. One graph may hold the updates of several consecutive batches:
between two graphs a GPU waits about 25 µs on an H200, between two steps of one graph it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(eq=False)
class TrainingStep:
    """One update: forward, loss and backward of every micro-batch, exchange in the last, optimizer.

    Micro-batches of other than ``usual_sizes``, in the last batch of an epoch, use ``rare_forward``:
    compiling for them would take longer than it saves. With a ``recorder`` an update is a graph, one
    for every number of samples and micro-batches. Variants with another exchange have graphs of
    their own. All share the recorder's memory pool.
    """

    forward: Forward
    rare_forward: Forward
    usual_sizes: Container[int]
    precision: Precision
    optimizer: torch.optim.Optimizer
    context: MicroBatchContext
    lr_schedule: ConstantLearningRate
    exchange_wait: ExchangeWait
    recorder: CudaGraphRecorder | None = None

    def __post_init__(self) -> None:
        self._graphs: dict[Hashable, tuple[CapturedFunction, CapturedFunction]] = {}
        self.switch_exchange(communication_key(NO_INTERVENTIONS))

    def __call__(self, tensors: Tensors, epoch: Tensor, parts: MicroBatches) -> Tensor:
        """Update on the tensors of a batch, its epoch int64 [] and its micro-batches.

        Returns the mean loss over this rank's samples, not read yet.
        """
        if self.recorder is None:
            return self.update(tensors, epoch, parts)
        return _call_captured(self._captured, (*tensors, epoch), parts)

    def run_many(
        self, tensors: Sequence[Tensors], epoch: Tensor, parts: MicroBatches, rates: Tensor
    ) -> Tensor:
        """Update on each of several equal batches, with ``rates`` of ``step_rates``; losses [n].

        Makes the updates in one graph; one by one until single updates have warmed up.
        """
        if self.recorder is None or not self._captured.is_warm((*tensors[0], epoch), parts):
            return self._run_each(self, tensors, epoch, parts, rates)
        flat = [tensor for one in tensors for tensor in one]
        return _call_captured(self._captured_many, (*flat, epoch, rates), parts, len(tensors))

    def update(self, tensors: Tensors, epoch: Tensor, parts: MicroBatches) -> Tensor:
        first, *others = [self._accumulate(tensors, epoch, part) for part in parts]
        self.precision.step(self.optimizer)
        return sum(others, first)

    def _accumulate(self, tensors: Tensors, epoch: Tensor, part: MicroBatch) -> Tensor:
        forward = self.forward if part.rows in self.usual_sizes else self.rare_forward
        with self.context(part.share):
            loss = forward(part.select_rows(tensors), epoch)
            weighted = _scale(loss, part.gradient_weight)
            with self.exchange_wait.measure(weighted):
                self.precision.backward(weighted)
        return _scale(loss.detach(), part.loss_weight)

    def _run_each(
        self,
        update: Callable[[Tensors, Tensor, MicroBatches], Tensor],
        tensors: Sequence[Tensors],
        epoch: Tensor,
        parts: MicroBatches,
        rates: Tensor,
    ) -> Tensor:
        losses = []
        for number, one in enumerate(tensors):
            self.lr_schedule.load_rate(rates, number)
            losses.append(update(one, epoch, parts))
        return torch.stack(losses)

    def switch_exchange(self, exchange_key: Hashable) -> None:
        if self.recorder is None:
            return

        def run_one(*arguments: Any) -> Tensor:
            *tensors, epoch, parts = arguments
            return self.update(tuple(tensors), epoch, parts)

        def run_many(*arguments: Any) -> Tensor:
            *flat, epoch, rates, parts, n = arguments
            each = len(flat) // n
            tensors = [tuple(flat[k : k + each]) for k in range(0, len(flat), each)]
            return self._run_each(self.update, tensors, epoch, parts, rates)

        if exchange_key not in self._graphs:
            many = CapturedFunction(run_many, self.recorder, warm_up=0)
            self._graphs[exchange_key] = CapturedFunction(run_one, self.recorder), many
        self._captured, self._captured_many = self._graphs[exchange_key]

    def graph_bytes(self) -> int:
        """Return the device memory that recorded graphs reserve."""
        return 0 if self.recorder is None else self.recorder.pool_bytes()

    def close(self) -> None:
        for captured, captured_many in self._graphs.values():
            captured.close()
            captured_many.close()


def _scale(loss: Tensor, weight: float) -> Tensor:
    return loss if weight == 1 else loss * weight


def _call_captured(captured: CapturedFunction, tensors: Tensors, *constants: Hashable) -> Tensor:
    try:
        losses: Tensor = captured(tensors, *constants)
    except CaptureFailed as failed:
        location = error_location(failed.__cause__) if failed.__cause__ else None
        where = f" ({location})" if location else ""
        raise UsageError(
            f"the step cannot be captured as a CUDA graph: {failed.reason}{where}; next: --step eager"
        ) from failed
    return losses


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
