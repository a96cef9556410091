"""Our own gradient exchange: bucketed all-reduce that runs while backward still computes.

Works on the user's own module through public hooks, without wrapping it. Parameters fill
buckets in reverse order of registration, which is about the order in which backward reaches
them; a full bucket is summed over the ranks at once, in the same order on every rank (S. Li and
others, PyTorch Distributed, VLDB 2020). Unlike DistributedDataParallel it weights each rank's
gradient by its share of the global batch, so that shares that differ give the gradient of the
whole batch, and it needs no search for unused parameters: whatever has not come when backward
ends counts zero, and what no rank has used keeps no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nfold.errors import UsageError
from nfold.frameworks.torch.bucket import Bucket
from nfold.frameworks.torch.share import Ledger

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the exchange begins early."""
BUCKET_BYTES = 25 * 2**20
"""As DistributedDataParallel has them by default."""


@dataclass(frozen=True)
class Travelling:
    """A bucket under way; ``ask`` as for ``Bucket.hand_back``."""

    bucket: Bucket
    work: Any
    ask: bool

    def leave(self) -> None:
        """Take the rank's own gradients away."""
        for parameter in self.bucket.parameters:
            parameter.grad = None

    def arrive(self) -> None:
        """Wait for the sum, and give the parameters their gradients."""
        if self.work is not None:
            self.work.wait()
        if self.bucket.wire is not self.bucket.flat:
            self.bucket.flat.copy_(self.bucket.wire)
        self.bucket.hand_back(ask=self.ask)


class Exchange:
    """Sums gradients over all ranks, weighted by the ledger's shares, during backward.

    ``finished`` counts the backwards whose gradients were exchanged.
    After ``loss.backward()`` every parameter's ``grad`` is that of the mean loss over the global
    batch, on every rank. In a part of a step that is not the last, gradients are kept aside and
    ``grad`` is None, so that an optimizer that steps anyway does nothing. ``groups`` are
    parameters in the order of forward; no bucket holds some of two groups. The first bucket of
    a group is small, unless all gradients of a group come ``together``.
    """

    def __init__(
        self,
        groups: Iterable[Iterable[nn.Parameter]],
        world_size: int,
        ledger: Ledger,
        *,
        wire: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        together: bool = False,
        all_reduce: Callable[..., Any] = dist.all_reduce,
    ) -> None:
        self._all_reduce = all_reduce
        self._world_size = world_size
        self._ledger = ledger
        self._groups = [list(group) for group in groups]
        self._wire = wire
        first = bucket_bytes if together else min(FIRST_BUCKET_BYTES, bucket_bytes)
        self._sizes = bucket_bytes, first
        self._next = 0
        self._running = False
        self._holding = False
        self._works: list[Any] = []
        self._overlaps = False
        self._late: Travelling | None = None
        self.finished = 0
        self._where: dict[nn.Parameter, tuple[int, int]] = {}
        self._handles: list[RemovableHandle] = []
        self._take()

    def _take(self) -> None:
        """Exchange from now on what is trained now, besides what was so far."""
        before = self._where
        parts = [[p for p in g if p.requires_grad or p in before] for g in self._groups]
        new = [p for part in parts for p in part if p not in before]
        if before and not new:
            return
        self.buckets = [
            Bucket(filled, self._wire)
            for part in reversed(parts)
            for filled in in_buckets(part, *self._sizes)
        ]
        self._where = {
            parameter: (number, place)
            for number, bucket in enumerate(self.buckets)
            for place, parameter in enumerate(bucket.parameters)
        }
        self._handles += [_hook(parameter, self._arrive) for parameter in new]

    @property
    def holding(self) -> bool:
        """Whether earlier parts of the current step left their gradients here."""
        return self._holding

    def replayed(self) -> None:
        """A part of a step was made without this object's hooks, by a graph."""
        self._holding = not self._ledger.share.last

    def abandon(self) -> None:
        """A backward is over, perhaps with an error: the next one begins anew."""
        for bucket in self.buckets:
            bucket.arrived.clear()
        self._works.clear()
        self._next = 0
        self._running = False

    def begin(self) -> None:
        """An epoch begins: a step whose loop was left between two parts is forgotten.

        What a script has thawed since the last one is exchanged from now on. What it has frozen
        still is, without a gradient: some scripts freeze a model for a part of every step.
        """
        self.abandon()
        self._holding = False
        self._take()

    def overlap(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the last bucket travel on while ``optimizer`` updates what the others hold.

        Its step then runs twice, each time over parameters that have a gradient, as all of
        torch's optimizers do. Not for what reads all gradients at once: clipping, a loss scale.
        """
        self._overlaps = len(self.buckets) > 1
        optimizer.register_step_post_hook(self._update_late)

    def _update_late(self, optimizer: torch.optim.Optimizer, *_called_with: Any) -> None:
        late, self._late = self._late, None
        if late is None:
            return
        own = set(late.bucket.parameters)
        updated = [(p, p.grad) for p in self._where if p not in own]
        for parameter, _ in updated:
            parameter.grad = None
        late.arrive()
        optimizer.step()
        for parameter, gradient in updated:
            parameter.grad = gradient

    def remove(self) -> None:
        """Leave the parameters alone again."""
        for handle in self._handles:
            handle.remove()

    def _arrive(self, parameter: Tensor) -> None:
        """Called by autograd when a parameter's gradient is complete."""
        if not self._running:
            self._begin()
        number, place = self._where[parameter]  # type: ignore[index]  # the hook's type is Tensor
        bucket = self.buckets[number]
        if place in bucket.arrived:
            raise UsageError(
                "a parameter's gradient came twice in one backward (reentrant checkpointing); "
                "next: torch.utils.checkpoint(..., use_reentrant=False)"
            )
        bucket.arrived.add(place)
        while self._next < len(self.buckets) and self.buckets[self._next].full:
            self._launch(self.buckets[self._next])

    def _begin(self) -> None:
        if self._late is not None:
            raise UsageError("a second backward before optimizer.step(); next: one of each a step")
        self._running = True
        # What DistributedDataParallel and FSDP use to learn that this backward is over.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _launch(self, bucket: Bucket) -> None:
        """Take a bucket's gradients in, and send it unless more parts of the step follow."""
        self._next += 1
        share = self._ledger.share
        if share.parts > 1 and bucket.exchanged():
            raise UsageError(
                "a gradient of the last step is still there, or a part of a step had a second "
                "backward; next: optimizer.zero_grad() after optimizer.step(), one backward a part"
            )
        average = self._averages(bucket)
        bucket.gather(None if average else share.weight, keep=self._holding)
        if share.last:
            self._send(bucket, average)
        else:
            for parameter in bucket.parameters:
                parameter.grad = None

    def _send(self, bucket: Bucket, average: bool) -> None:
        if bucket.wire is not bucket.flat:
            bucket.wire.copy_(bucket.flat)
        if self._world_size > 1:
            how = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
            self._works.append(self._all_reduce(bucket.wire, op=how, async_op=True))

    def _averages(self, bucket: Bucket) -> bool:
        """Whether NCCL divides on its way, at no cost; gloo cannot, nor can uneven shares."""
        even = self._ledger.share.parts == 1 and self._ledger.even(self._world_size)
        return even and self._world_size > 1 and bucket.flat.is_cuda

    def _finish(self) -> None:
        """Backward is over: send what never filled up, wait, hand the gradients back."""
        missing = [not bucket.full for bucket in self.buckets]
        while self._next < len(self.buckets):
            self._launch(self.buckets[self._next])
        last = self._ledger.share.last
        if last:
            works = self._works or [None] * len(self.buckets)
            under_way = [*map(Travelling, self.buckets, works, missing)]
            if self._overlaps:
                self._late = under_way.pop()
                self._late.leave()
            for travelling in under_way:
                travelling.arrive()
        self.abandon()
        self._holding = not last
        self.finished += last


def _hook(parameter: nn.Parameter, arrive: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(arrive)  # type: ignore[no-untyped-call]
    return handle


def in_buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, first_bytes: int
) -> list[list[nn.Parameter]]:
    """Parameters of one type and device together, last first, up to ``bucket_bytes`` a bucket.

    The first bucket holds up to ``first_bytes``; any holds one parameter at least.
    """
    groups: list[list[nn.Parameter]] = []
    filled, limit = 0, first_bytes
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        if groups and filled + size <= limit and _alike(groups[-1][0], parameter):
            groups[-1].append(parameter)
            filled += size
            continue
        limit = bucket_bytes if groups else limit
        groups.append([parameter])
        filled = size
    return groups


def _alike(first: nn.Parameter, second: nn.Parameter) -> bool:
    return first.dtype == second.dtype and first.device == second.device
