"""Gradient exchange: bucketed all-reduce that overlaps with backward.

Works on the user's own module through public hooks, without a wrapper. Parameters fill buckets in
reverse order of registration, which is about the order of backward. A full bucket is all-reduced
at once, in the same order on every rank (S. Li and others, PyTorch Distributed, VLDB 2020). Unlike
DistributedDataParallel it weights each rank's gradient by its share of the global batch, and needs
no search for unused parameters: a gradient that is missing when backward ends counts as zero, and
a parameter that no rank used keeps no gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.utils.hooks import RemovableHandle

from nfold.core.errors import UsageError
from nfold.engines.interleaver import ActiveVariant
from nfold.engines.torch.batch import CurrentShare
from nfold.instrument.torch_private import foreach_add, foreach_copy, queue_backward_callback

ALIGNMENT = 8  # numbers: 16 bytes of the smallest type that has gradients


class Bucket:
    """Some parameters whose gradients are exchanged together.

    ``flat`` holds the gradients and, behind them, one number per parameter that is 0 if no rank
    used it. ``views`` are the parts of ``flat``. ``payload`` is sent: ``flat`` itself, or its copy
    in ``payload_dtype``. Parameters whose size is no multiple of ALIGNMENT come last: views behind
    them would not be aligned for vectorised kernels, such as those of fused optimizers.
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
        self._strides = [view.stride() for view in self.views]
        self._pointers = [view.data_ptr() for view in self.views]
        self._ones = torch.ones_like(self._used)
        self.payload = (
            self.flat if payload_dtype is None else torch.empty_like(self.flat, dtype=payload_dtype)
        )
        self.ready: set[int] = set()
        self._has_gradient: tuple[bool, ...] = ()
        self._used_flags: dict[tuple[bool, ...], list[bool]] = {}

    @property
    def is_full(self) -> bool:
        return len(self.ready) == len(self.parameters)

    @property
    def lacks_trained(self) -> bool:
        """Return whether a parameter that is not frozen has no gradient of this backward."""
        places = enumerate(self.parameters)
        return any(p.requires_grad and place not in self.ready for place, p in places)

    def gather(self, weight: float | None, *, accumulate: bool) -> None:
        """Copy the gradients in, weighted; ``accumulate`` adds them to earlier micro-batches.

        ``weight`` None leaves them unscaled: the all-reduce averages. A missing gradient counts as
        zero. A gradient that an earlier backward of the same step exchanged is in its view
        already, and a weighted sum of equal values leaves it unchanged.
        """
        gradients = [_gradient(parameter) for parameter in self.parameters]
        self._has_gradient = tuple(gradient is not None for gradient in gradients)
        if accumulate:
            self._add_in(gradients, 1.0 if weight is None else weight)
            return
        self._copy_in(gradients)
        if weight is not None:
            self.flat.mul_(weight)

    def _copy_in(self, gradients: Sequence[Tensor | None]) -> None:
        """Usually one ``torch.cat``, a single kernel that uses the whole GPU.

        ``_foreach_copy_`` uses one block per 65,536 numbers and takes three times as long for the
        gradients of cnn10.
        """
        dense = self._dense(gradients)
        if dense is not None:
            torch.cat([*dense, self._ones], out=self.flat)
            return
        pairs = list(zip(self.views, gradients, strict=True))
        for view in (view for view, gradient in pairs if gradient is None):
            view.zero_()
        taken = [(view, g) for view, g in pairs if g is not None and not _same_memory(view, g)]
        flags = self._flags(gradients)
        foreach_copy([*(view for view, _ in taken), self._used], [*(g for _, g in taken), flags])

    def _dense(self, gradients: Sequence[Tensor | None]) -> list[Tensor] | None:
        """Return the gradients as vectors, if each has the layout of its view and its own memory."""
        dense = []
        places = zip(gradients, self._strides, self._pointers, strict=True)
        for gradient, strides, pointer in places:
            if gradient is None or gradient.dtype != self.flat.dtype:
                return None
            if gradient.stride() != strides and not _same_order(gradient, strides):
                return None
            if gradient.data_ptr() == pointer:
                return None
            dense.append(gradient.as_strided((gradient.numel(),), (1,)))
        return dense

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
            foreach_add(views, added, alpha=weight)
        self._used.add_(self._flags(gradients))

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def has_exchanged_gradient(self) -> bool:
        """Return whether a gradient was exchanged before and not cleared since."""
        return any(
            parameter.grad is not None and _same_memory(view, parameter.grad)
            for view, parameter in zip(self.views, self.parameters, strict=True)
        )

    def assign_gradients(self, *, check_unused: bool) -> None:
        """Set every parameter's gradient to its part of the sum.

        A frozen parameter without a gradient keeps none. ``check_unused``: another parameter was
        not used on this rank. If no rank used it, its gradient becomes None too, so that the
        optimizer skips it as on one device. Reading this waits for the device. A CUDA graph takes
        the last answer for the same gradients of this rank, since its replays repeat the same step,
        which may have several backwards.
        """
        used: Sequence[bool] = self._has_gradient
        if check_unused:
            if not (self.flat.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._used_flags[self._has_gradient] = (self._used != 0).tolist()
            used = self._used_flags.get(self._has_gradient, used)
        for parameter, view, is_used in zip(self.parameters, self.views, used, strict=True):
            parameter.grad = view if is_used else None


def _view_like(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """``part`` [numel] in the parameter's shape and strides, which fused optimizers need.

    The gradient of an expanded parameter is contiguous.
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
    return view.numel() > 0 and view.data_ptr() == gradient.data_ptr()


def _same_order(gradient: Tensor, strides: tuple[int, ...]) -> bool:
    """Return whether strides differ only along axes of length 1."""
    axes = zip(gradient.shape, gradient.stride(), strides, strict=True)
    return all(size == 1 or own == other for size, own, other in axes)


FIRST_BUCKET_BYTES = 2**20  # small, so that the exchange begins early
BUCKET_BYTES = 25 * 2**20  # default of DistributedDataParallel


@dataclass(frozen=True)
class PendingBucket:
    """A bucket whose all-reduce was launched; ``check_unused`` as in ``assign_gradients``."""

    bucket: Bucket
    work: Any
    check_unused: bool

    def complete(self) -> None:
        if self.work is not None:
            self.work.wait()
        if self.bucket.payload is not self.bucket.flat:
            self.bucket.flat.copy_(self.bucket.payload)
        self.bucket.assign_gradients(check_unused=self.check_unused)


class StepGuard(Protocol):
    """Lets all ranks give up a step together after an error on one of them.

    ``holds_exchange``: no bucket is sent before the end of backward.
    """

    @property
    def holds_exchange(self) -> bool: ...

    def confirm(self) -> None:
        """Wait until all ranks have computed their gradients; raise if one of them failed."""


class GradientExchange:
    """Sums gradients over all ranks during backward, weighted by ``current_share``.

    After ``loss.backward()`` every parameter's ``grad`` is that of the mean loss over the global
    batch, on every rank. Before the last micro-batch of a step, gradients are accumulated in the
    buckets and ``grad`` is None, so that an optimizer step does nothing.
    ``completed_backwards`` counts the backwards whose gradients were exchanged.

    Args:
        groups: Parameters in the order of forward. No bucket spans two groups.
        payload_dtype: Type that gradients are sent in; None for their own.
        single_bucket: All gradients of a group arrive at once: no small first bucket.
        all_reduce: Replaces ``dist.all_reduce`` in experiments.
        guard: Confirms every exchange at the end of its backward.
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
        guard: StepGuard | None = None,
    ) -> None:
        self._all_reduce = all_reduce
        self._guard = guard
        self._world_size = world_size
        self._current_share = current_share
        self._groups = [list(group) for group in groups]
        self._payload_dtype = payload_dtype
        first = bucket_bytes if single_bucket else min(FIRST_BUCKET_BYTES, bucket_bytes)
        self._sizes = bucket_bytes, first
        self._next = self._sent = 0
        self._running = False
        self._accumulating = False
        self._works: list[Any] = []
        self._overlaps = False
        self._pending: PendingBucket | None = None
        self.completed_backwards = 0
        self.buckets: list[Bucket] = []
        self._locations: dict[nn.Parameter, tuple[int, int]] = {}
        self._add_buckets()
        parameters = {parameter for group in self._groups for parameter in group}
        self._handles = [
            self._watch(p) for p in parameters if p.is_floating_point() or p.is_complex()
        ]

    def _watch(self, parameter: nn.Parameter) -> RemovableHandle:
        # A frozen parameter refuses a hook, but keeps one.
        is_trained, parameter.requires_grad = parameter.requires_grad, True
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            self._on_gradient
        )
        parameter.requires_grad_(is_trained)
        return handle

    def _add_buckets(self) -> None:
        # Behind the others, which may hold gradients. Parameters that are frozen again keep their
        # places, without a gradient: some scripts freeze a model for a part of every step.
        for group in reversed(self._groups):
            new = [p for p in group if p.requires_grad and p not in self._locations]
            for filled in split_into_buckets(new, *self._sizes):
                bucket = Bucket(filled, self._payload_dtype)
                places = enumerate(bucket.parameters)
                self._locations |= {p: (len(self.buckets), place) for place, p in places}
                self.buckets.append(bucket)
        self._frozen = [p for group in self._groups for p in group if p not in self._locations]

    @property
    def is_accumulating(self) -> bool:
        return self._accumulating

    def after_replay(self) -> None:
        """A CUDA graph made a micro-batch without calling the hooks."""
        self._accumulating = not self._current_share.share.is_last

    def reset(self) -> None:
        """Prepare for the next backward, also after an error."""
        for bucket in self.buckets:
            bucket.ready.clear()
        self._works.clear()
        self._next = self._sent = 0
        self._running = False

    @property
    def has_sent(self) -> bool:
        """Return whether a bucket of the current backward was sent."""
        return self._sent > 0

    def abandon(self, *, send_rest: bool) -> None:
        """Discard the current step and its gradients.

        ``send_rest``: a rank has sent buckets; all ranks send the others, so that none waits.
        """
        if send_rest:
            self._send_rest()
            for work in self._works:
                work.wait()
        for bucket in self.buckets:
            bucket.clear_gradients()
        self.reset()
        self._accumulating = False

    def begin_epoch(self) -> None:
        """Discard an unfinished step."""
        self.reset()
        self._accumulating = False

    def overlap_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the last bucket overlap with the optimizer's update of the other parameters.

        The optimizer steps twice, each time over the parameters that have a gradient, as all
        optimizers of torch do. Not for code that reads all gradients: clipping, a loss scale.
        """
        self._overlaps = len(self.buckets) > 1
        optimizer.register_step_post_hook(self._update_pending)

    def _update_pending(self, optimizer: torch.optim.Optimizer, *_called_with: Any) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        own = set(pending.bucket.parameters)
        updated = [(p, p.grad) for p in self._locations if p not in own]
        for parameter, _ in updated:
            parameter.grad = None
        pending.complete()
        optimizer.step()
        for parameter, gradient in updated:
            parameter.grad = gradient

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._running:
            self._begin_backward()
        number, place = self._locations[parameter]  # type: ignore[index]  # the hook's type is Tensor
        ready = self.buckets[number].ready
        if place in ready:
            raise UsageError(
                "a parameter got two gradients in one backward (reentrant checkpointing); "
                "next: torch.utils.checkpoint(..., use_reentrant=False)"
            )
        ready.add(place)
        if number != self._next:
            return
        while self._next < len(self.buckets) and self.buckets[self._next].is_full:
            self._launch_bucket(self.buckets[self._next])

    def _begin_backward(self) -> None:
        if self._pending is not None:
            raise UsageError(
                "a second backward before optimizer.step(); next: one backward per step"
            )
        if torch.is_grad_enabled():
            raise UsageError(
                "gradients of backward(create_graph=True) cannot be exchanged; next: "
                "torch.autograd.grad(..., create_graph=True), and backward() of a loss of its result"
            )
        if any(parameter.requires_grad for parameter in self._frozen):
            self._add_buckets()
        self._running = True
        queue_backward_callback(self._finish_backward)

    def _launch_bucket(self, bucket: Bucket) -> None:
        self._next += 1
        share = self._current_share.share
        if share.micro_batches > 1 and bucket.has_exchanged_gradient():
            raise UsageError(
                "a gradient of the last step was not cleared, or a micro-batch had a second "
                "backward; next: optimizer.zero_grad() after optimizer.step(), one backward each"
            )
        weight = None if self._averages(bucket) or share.weight == 1 else share.weight
        bucket.gather(weight, accumulate=self._accumulating)
        if not share.is_last:
            bucket.clear_gradients()
        elif self._guard is None or not self._guard.holds_exchange:
            self._send(bucket)

    def _averages(self, bucket: Bucket) -> bool:
        return (
            self._current_share.share.micro_batches == 1
            and self._current_share.is_even(self._world_size)
            and self._world_size > 1
            and bucket.flat.is_cuda
        )

    def _send(self, bucket: Bucket) -> None:
        if bucket.payload is not bucket.flat:
            bucket.payload.copy_(bucket.flat)
        if self._world_size > 1:
            how = dist.ReduceOp.AVG if self._averages(bucket) else dist.ReduceOp.SUM
            self._works.append(self._all_reduce(bucket.payload, op=how, async_op=True))
        self._sent += 1

    def _send_rest(self) -> None:
        for bucket in self.buckets[self._sent :]:
            self._send(bucket)

    def _finish_backward(self) -> None:
        share = self._current_share.share
        in_parts, last = share.micro_batches > 1, share.is_last
        missing = [not b.is_full and (in_parts or b.lacks_trained) for b in self.buckets]
        while self._next < len(self.buckets):
            self._launch_bucket(self.buckets[self._next])
        if last:
            if self._guard is not None:
                self._guard.confirm()
            self._send_rest()
            works = self._works or [None] * len(self.buckets)
            pending = [*map(PendingBucket, self.buckets, works, missing)]
            if self._overlaps:
                self._pending = pending.pop()
                self._pending.bucket.clear_gradients()
            for bucket in pending:
                bucket.complete()
        self.reset()
        self._accumulating = not last
        self.completed_backwards += last


class ExchangeWait:
    """Measures how long the host waits for the gradient exchange after the backward of this rank.

    Only for CPU devices, where the host waits; a slow rank waits less than the others. Callbacks of
    the autograd engine run in order at the end of a backward: one that is queued at its begin runs
    before those in which DistributedDataParallel and ``GradientExchange`` wait.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._seconds = 0.0
        self._computed_at: float | None = None

    @contextmanager
    def measure(self, loss: object) -> Iterator[None]:
        """Measure the backward of a tensor in this context; not that of a GradientEdge."""
        if not (self.enabled and isinstance(loss, Tensor) and loss.requires_grad):
            yield
            return
        handle = loss.register_hook(self._on_begin)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            handle.remove()
        if self._computed_at is not None:
            self._seconds += time.monotonic() - self._computed_at
            self._computed_at = None

    def take_seconds(self) -> float | None:
        """Return the seconds since the last call; None if they are not measured."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds if self.enabled else None

    def add_call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that only waits for other ranks, and add its time."""
        started = time.monotonic()
        result = function(*arguments)
        self._seconds += time.monotonic() - started
        return result

    def _on_begin(self, _gradient: Tensor) -> None:
        queue_backward_callback(self._on_end)

    def _on_end(self) -> None:
        self._computed_at = time.monotonic()


def split_into_buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, first_bytes: int
) -> list[list[nn.Parameter]]:
    """Group parameters of one type and device, last first, up to ``bucket_bytes`` a bucket.

    The first bucket holds up to ``first_bytes``; every bucket holds at least one parameter.
    """
    groups: list[list[nn.Parameter]] = []
    filled, limit = 0, first_bytes
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        same = groups and (groups[-1][0].dtype, groups[-1][0].device) == (
            parameter.dtype,
            parameter.device,
        )
        if same and filled + size <= limit:
            groups[-1].append(parameter)
            filled += size
            continue
        limit = bucket_bytes if groups else limit
        groups.append([parameter])
        filled = size
    return groups


# Exchange of variants: none, one element per bucket, or 16 bits. The collectives have the same number
# and order as in the real run. Every bucket looks up the current variant.

AllReduce = Callable[..., Any]  # ``dist.all_reduce`` or a replacement


class CompletedWork:
    """The handle of a collective that does nothing."""

    def wait(self) -> None:
        pass


def select_all_reduce(active_variant: ActiveVariant) -> AllReduce:
    """Return the all-reduce that ``GradientExchange`` calls for each bucket."""
    if active_variant.is_baseline("exchange"):
        return dist.all_reduce

    def send(tensor: Tensor, **how: Any) -> Any:
        exchange = active_variant.current.exchange
        if exchange == "none":
            return CompletedWork()
        sent = torch.zeros(1, device=tensor.device) if exchange == "barrier" else tensor
        return dist.all_reduce(sent, **how)

    return send


def replaces_ddp_hook(active_variant: ActiveVariant) -> bool:
    """Return whether a variant exchanges gradients by another hook than the script's."""
    return not all(map(active_variant.is_baseline, ("exchange", "gradient_compression")))


def select_ddp_hook(active_variant: ActiveVariant, default_hook: Any) -> Any:
    """Return the communication hook of DistributedDataParallel; None for its own all-reduce.

    The hook is registered with the process group as its state.
    """
    if not replaces_ddp_hook(active_variant):
        return default_hook
    usual = default_hook or allreduce_hook
    compressed = {"none": usual, "bf16": bf16_compress_hook, "fp16": fp16_compress_hook}

    # DistributedDataParallel refuses hooks with annotations as strings.
    def exchange(group, bucket):  # type: ignore[no-untyped-def]
        variant, gradients = active_variant.current, bucket.buffer()
        if variant.exchange == "barrier":
            work: Any = dist.all_reduce(torch.zeros(1, device=gradients.device), async_op=True)
            return work.get_future().then(lambda _: gradients)
        hook = compressed[variant.gradient_compression]
        return (noop_hook if variant.exchange == "none" else hook)(group, bucket)

    return exchange
