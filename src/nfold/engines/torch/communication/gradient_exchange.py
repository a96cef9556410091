"""Gradients that travel together, one after the other in one piece of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nfold.core.errors import UsageError
from nfold.engines.torch.batch import CurrentShare

ALIGNMENT = 8
"""Numbers: 16 bytes of the smallest type that has gradients."""


class Bucket:
    """Some parameters whose gradients travel together.

    ``flat`` holds the gradients one after the other and, behind them, one number per parameter
    that tells whether anybody used it; ``views`` are the parts of ``flat``. ``wire`` is what is
    sent: ``flat`` itself, or its copy in a smaller type. ``parameters`` are in the order given,
    but those of a size that is no multiple of ALIGNED come last: behind one, no view would
    begin where vectorised kernels, the fused optimizers' among them, can read it.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], payload_dtype: torch.dtype | None
    ) -> None:
        self.parameters = tuple(sorted(parameters, key=lambda p: p.numel() % ALIGNMENT != 0))
        first = self.parameters[0]
        sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        *parts, self._used = torch.split(self.flat, [*sizes, len(sizes)])
        self.views = [
            _view_like(part, parameter)
            for part, parameter in zip(parts, self.parameters, strict=True)
        ]
        self._ones = torch.ones_like(self._used)
        self.payload = (
            self.flat if payload_dtype is None else torch.empty_like(self.flat, dtype=payload_dtype)
        )
        self.ready: set[int] = set()
        self._used_flags = [True] * len(self.parameters)

    @property
    def is_full(self) -> bool:
        """Whether every parameter's gradient of this backward is there."""
        return len(self.ready) == len(self.parameters)

    def gather(self, weight: float | None, *, accumulate: bool) -> None:
        """Take the gradients in, weighted; ``keep`` adds them to what earlier parts left here.

        ``weight`` None leaves them as they are: the sum is divided elsewhere. Parameters without
        a gradient count zero. A gradient that an earlier backward of the same step exchanged is
        in its view already, and a weighted sum of equals leaves it as it is.
        """
        gradients = [_gradient(parameter) for parameter in self.parameters]
        if accumulate:
            self._add_in(gradients, 1.0 if weight is None else weight)
            return
        self._copy_in(gradients)
        if weight is not None:
            self.flat.mul_(weight)

    def _copy_in(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy the gradients in: usually all at once, one after the other.

        On a GPU that is one kernel that uses all of it. The copies of a list of tensors use a
        block for every 65,536 numbers, and take three times as long for gradients of cnn10.
        """
        pairs = list(zip(self.views, gradients, strict=True))
        if all(g is not None and _has_layout_of(g, view) for view, g in pairs):
            dense = [g.as_strided((g.numel(),), (1,)) for _, g in pairs if g is not None]
            torch.cat([*dense, self._ones], out=self.flat)
            return
        for view in (view for view, gradient in pairs if gradient is None):
            view.zero_()
        taken = [(view, g) for view, g in pairs if g is not None and not _same_memory(view, g)]
        flags = self._flags(gradients)
        torch._foreach_copy_(
            [*(view for view, _ in taken), self._used], [*(g for _, g in taken), flags]
        )

    def _flags(self, gradients: Sequence[Tensor | None]) -> Tensor:
        if all(gradient is not None for gradient in gradients):
            return self._ones
        flags = self._ones.clone()
        for place, gradient in enumerate(gradients):
            if gradient is None:
                flags[place].zero_()
        return flags

    def _add_in(self, gradients: Sequence[Tensor | None], weight: float) -> None:
        pairs = [(v, g) for v, g in zip(self.views, gradients, strict=True) if g is not None]
        if pairs:
            views, added = map(list, zip(*pairs, strict=True))
            torch._foreach_add_(views, added, alpha=weight)
        self._used.add_(self._flags(gradients))

    def has_exchanged_gradient(self) -> bool:
        """Whether a gradient here is one that was exchanged before and not cleared since."""
        return any(
            parameter.grad is not None and _same_memory(view, parameter.grad)
            for view, parameter in zip(self.views, self.parameters, strict=True)
        )

    def assign_gradients(self, *, check_unused: bool) -> None:
        """Give every parameter its part of the sum as its gradient.

        ``ask``: some parameter was not used here; one that was used nowhere gets None, so that
        the optimizer leaves it alone, as it would on one device. Reading that waits for the
        device, but only then. A graph cannot ask: it takes the last answer, since in it every
        rank does as it did.
        """
        used = [True] * len(self.parameters)
        if check_unused:
            if not _is_capturing(self.flat):
                self._used_flags = (self._used != 0).tolist()
            used = self._used_flags
        for parameter, view, wanted in zip(self.parameters, self.views, used, strict=True):
            parameter.grad = view if wanted else None


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _view_like(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """``part`` [numel] in the parameter's shape and order of axes, as fused optimizers want it.

    A parameter with gaps in it, an expanded one, gets its gradient in the usual order.
    """
    dense = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, dense, part.storage_offset())


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    gradient = parameter.grad
    if gradient is not None and gradient.is_sparse:
        raise UsageError(
            "a sparse gradient cannot be exchanged in buckets; next: nn.Embedding(sparse=False)"
        )
    return gradient


def _same_memory(view: Tensor, gradient: Tensor) -> bool:
    return view.data_ptr() == gradient.data_ptr()


def _has_layout_of(gradient: Tensor, view: Tensor) -> bool:
    axes = zip(view.shape, view.stride(), gradient.stride(), strict=True)
    alike = all(size == 1 or mine == its for size, mine, its in axes)
    return alike and gradient.dtype == view.dtype and not _same_memory(view, gradient)


# Our own gradient exchange: bucketed all-reduce that runs while backward still computes.
#
# Works on the user's own module through public hooks, without wrapping it. Parameters fill
# buckets in reverse order of registration, which is about the order in which backward reaches
# them; a full bucket is summed over the ranks at once, in the same order on every rank (S. Li and
# others, PyTorch Distributed, VLDB 2020). Unlike DistributedDataParallel it weights each rank's
# gradient by its share of the global batch, so that shares that differ give the gradient of the
# whole batch, and it needs no search for unused parameters: whatever has not come when backward
# ends counts zero, and what no rank has used keeps no gradient.

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the exchange begins early."""
BUCKET_BYTES = 25 * 2**20
"""As DistributedDataParallel has them by default."""


@dataclass(frozen=True)
class PendingBucket:
    """A bucket under way; ``ask`` as for ``Bucket.hand_back``."""

    bucket: Bucket
    work: Any
    check_unused: bool

    def clear_gradients(self) -> None:
        """Take the rank's own gradients away."""
        for parameter in self.bucket.parameters:
            parameter.grad = None

    def complete(self) -> None:
        """Wait for the sum, and give the parameters their gradients."""
        if self.work is not None:
            self.work.wait()
        if self.bucket.payload is not self.bucket.flat:
            self.bucket.flat.copy_(self.bucket.payload)
        self.bucket.assign_gradients(check_unused=self.check_unused)


class GradientExchange:
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
        current_share: CurrentShare,
        *,
        payload_dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        single_bucket: bool = False,
        all_reduce: Callable[..., Any] = dist.all_reduce,
    ) -> None:
        self._all_reduce = all_reduce
        self._world_size = world_size
        self._current_share = current_share
        self._groups = [list(group) for group in groups]
        self._payload_dtype = payload_dtype
        first = bucket_bytes if single_bucket else min(FIRST_BUCKET_BYTES, bucket_bytes)
        self._sizes = bucket_bytes, first
        self._next = 0
        self._running = False
        self._accumulating = False
        self._works: list[Any] = []
        self._overlaps = False
        self._pending: PendingBucket | None = None
        self.completed_backwards = 0
        self._locations: dict[nn.Parameter, tuple[int, int]] = {}
        self._handles: list[RemovableHandle] = []
        self._register_parameters()

    def _register_parameters(self) -> None:
        before = self._locations
        parts = [[p for p in g if p.requires_grad or p in before] for g in self._groups]
        new = [p for part in parts for p in part if p not in before]
        if before and not new:
            return
        self.buckets = [
            Bucket(filled, self._payload_dtype)
            for part in reversed(parts)
            for filled in split_into_buckets(part, *self._sizes)
        ]
        self._locations = {
            parameter: (number, place)
            for number, bucket in enumerate(self.buckets)
            for place, parameter in enumerate(bucket.parameters)
        }
        self._handles += [_register_hook(parameter, self._on_gradient) for parameter in new]

    @property
    def is_accumulating(self) -> bool:
        """Whether earlier parts of the current step left their gradients here."""
        return self._accumulating

    def after_replay(self) -> None:
        """A part of a step was made without this object's hooks, by a graph."""
        self._accumulating = not self._current_share.share.is_last

    def reset(self) -> None:
        """A backward is over, perhaps with an error: the next one begins anew."""
        for bucket in self.buckets:
            bucket.ready.clear()
        self._works.clear()
        self._next = 0
        self._running = False

    def begin_epoch(self) -> None:
        """An epoch begins: a step whose loop was left between two parts is forgotten.

        What a script has thawed since the last one is exchanged from now on. What it has frozen
        still is, without a gradient: some scripts freeze a model for a part of every step.
        """
        self.reset()
        self._accumulating = False
        self._register_parameters()

    def overlap_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the last bucket travel on while ``optimizer`` updates what the others hold.

        Its step then runs twice, each time over parameters that have a gradient, as all of
        torch's optimizers do. Not for what reads all gradients at once: clipping, a loss scale.
        """
        self._overlaps = len(self.buckets) > 1
        optimizer.register_step_post_hook(self._update_pending)

    def _update_pending(self, optimizer: torch.optim.Optimizer, *_called_with: Any) -> None:
        late, self._pending = self._pending, None
        if late is None:
            return
        own = set(late.bucket.parameters)
        updated = [(p, p.grad) for p in self._locations if p not in own]
        for parameter, _ in updated:
            parameter.grad = None
        late.complete()
        optimizer.step()
        for parameter, gradient in updated:
            parameter.grad = gradient

    def remove(self) -> None:
        """Leave the parameters alone again."""
        for handle in self._handles:
            handle.remove()

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._running:
            self._begin_backward()
        number, place = self._locations[parameter]  # type: ignore[index]  # the hook's type is Tensor
        bucket = self.buckets[number]
        if place in bucket.ready:
            raise UsageError(
                "a parameter's gradient came twice in one backward (reentrant checkpointing); "
                "next: torch.utils.checkpoint(..., use_reentrant=False)"
            )
        bucket.ready.add(place)
        while self._next < len(self.buckets) and self.buckets[self._next].is_full:
            self._launch_bucket(self.buckets[self._next])

    def _begin_backward(self) -> None:
        if self._pending is not None:
            raise UsageError("a second backward before optimizer.step(); next: one of each a step")
        self._running = True
        # What DistributedDataParallel and FSDP use to learn that this backward is over.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _launch_bucket(self, bucket: Bucket) -> None:
        self._next += 1
        share = self._current_share.share
        if share.micro_batches > 1 and bucket.has_exchanged_gradient():
            raise UsageError(
                "a gradient of the last step is still there, or a part of a step had a second "
                "backward; next: optimizer.zero_grad() after optimizer.step(), one backward a part"
            )
        average = self._can_average(bucket)
        bucket.gather(None if average else share.weight, accumulate=self._accumulating)
        if share.is_last:
            self._send(bucket, average)
        else:
            for parameter in bucket.parameters:
                parameter.grad = None

    def _send(self, bucket: Bucket, average: bool) -> None:
        if bucket.payload is not bucket.flat:
            bucket.payload.copy_(bucket.flat)
        if self._world_size > 1:
            how = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
            self._works.append(self._all_reduce(bucket.payload, op=how, async_op=True))

    def _can_average(self, bucket: Bucket) -> bool:
        even = self._current_share.share.micro_batches == 1 and self._current_share.is_even(
            self._world_size
        )
        return even and self._world_size > 1 and bucket.flat.is_cuda

    def _finish_backward(self) -> None:
        missing = [not bucket.is_full for bucket in self.buckets]
        while self._next < len(self.buckets):
            self._launch_bucket(self.buckets[self._next])
        last = self._current_share.share.is_last
        if last:
            works = self._works or [None] * len(self.buckets)
            under_way = [*map(PendingBucket, self.buckets, works, missing)]
            if self._overlaps:
                self._pending = under_way.pop()
                self._pending.clear_gradients()
            for travelling in under_way:
                travelling.complete()
        self.reset()
        self._accumulating = not last
        self.completed_backwards += last


def _register_hook(parameter: nn.Parameter, arrive: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(arrive)  # type: ignore[no-untyped-call]
    return handle


def split_into_buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, first_bytes: int
) -> list[list[nn.Parameter]]:
    """Parameters of one type and device together, last first, up to ``bucket_bytes`` a bucket.

    The first bucket holds up to ``first_bytes``; any holds one parameter at least.
    """
    groups: list[list[nn.Parameter]] = []
    filled, limit = 0, first_bytes
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        if groups and filled + size <= limit and _same_type_and_device(groups[-1][0], parameter):
            groups[-1].append(parameter)
            filled += size
            continue
        limit = bucket_bytes if groups else limit
        groups.append([parameter])
        filled = size
    return groups


def _same_type_and_device(first: nn.Parameter, second: nn.Parameter) -> bool:
    return first.dtype == second.dtype and first.device == second.device
