"""Batch norm over the global batch: the plan's ``batch_norm`` ``synchronised``.

Mean and variance are those of all ranks' samples, so that training does not depend on the number
of devices (S. Ioffe and C. Szegedy, Batch Normalization, ICML 2015). Under gradient accumulation
they are those of one micro-batch. Unlike PyTorch's SyncBatchNorm, which needs a GPU and makes the
host wait, this implementation runs on CPUs and can be captured in a CUDA graph.

Forward gathers every rank's mean, variance and count and merges them (T. Chan and others, Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979); a difference of sums of
squares would lose precision for a large mean. Backward sums two numbers per channel over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nfold.core.errors import UsageError
from nfold.core.plan import Plan
from nfold.engines.sampling import BatchShare
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.layout import ChangedForward, subclass_with_forward
from nfold.instrument.torch_private import BatchNorm, check_input_dimensions

# renamed in torch 2.13
ALL_GATHER: Callable[[Tensor, Tensor], Any] = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)


@dataclass(frozen=True)
class BatchStatistics:
    """Biased ``variance`` and ``mean`` [channels] and ``count`` [1] over all ranks."""

    mean: Tensor
    variance: Tensor
    count: Tensor


class SynchronizedMarker(ChangedForward): ...


def synchronize_batch_norm(module: nn.Module, plan: Plan, current_share: CurrentShare) -> None:
    """Make the batch norms of ``module`` use the global batch, if the plan says so.

    Otherwise they accept a batch of one sample, which a device's share may be. Each layer stays
    the same object with its names and its state. Raises UsageError for a layer with a forward of
    its own.
    """
    if plan.batch_norm != "synchronised" or (plan.devices or 1) == 1:
        _allow_single_value(module)
        return
    for name, layer in module.named_modules():
        if isinstance(layer, SynchronizedMarker | nn.SyncBatchNorm) or not isinstance(
            layer, BatchNorm
        ):
            continue
        if type(layer).forward is not BatchNorm.forward:
            raise UsageError(
                f"batch_norm 'synchronised' cannot replace the forward of {name} "
                f"({type(layer).__name__}); allowed are nn.BatchNorm1d, 2d and 3d; "
                "next: batch_norm 'device'"
            )
        layer.__class__ = _synchronized_class(type(layer), plan, current_share)  # type: ignore[assignment]


def _allow_single_value(module: nn.Module) -> None:
    """Let batch norms train on one value per channel, which PyTorch refuses.

    The value is its own mean: the output is 0 and has no gradient, as in Keras. Two equal values
    give the same, and avoid dividing the running variance by 0.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for layer in module.modules():
        if isinstance(layer, BatchNorm) and type(layer).forward is BatchNorm.forward:
            original = type(layer)
            if original not in classes:
                classes[original] = _single_value_class(original)
            layer.__class__ = classes[original]  # type: ignore[assignment]


def _single_value_class(original: type[BatchNorm]) -> type[nn.Module]:
    def forward(self: BatchNorm, x: Tensor) -> Tensor:
        if self.training and x.numel() == x.shape[1]:
            return original.forward(self, torch.cat([x, x]))[:1]
        return original.forward(self, x)

    return subclass_with_forward(original, ChangedForward, forward)


class BatchNormSwitch:
    def __init__(self, module: nn.Module) -> None:
        layers = module.modules()
        self._layers = [
            (layer, type(layer)) for layer in layers if isinstance(layer, SynchronizedMarker)
        ]

    def __call__(self, *, synchronized: bool) -> None:
        for layer, changed in self._layers:
            layer.__class__ = changed if synchronized else changed.original  # type: ignore[assignment]


def _synchronized_class(
    original: type[BatchNorm], plan: Plan, current_share: CurrentShare
) -> type[nn.Module]:
    normalize: Callable[..., Tensor] = _normalize
    if "compiled" in (plan.step or ""):
        normalize = torch.compiler.disable(normalize)  # type: ignore[no-untyped-call]

    def forward(self: BatchNorm, x: Tensor) -> Tensor:
        if self.training:
            return normalize(self, x, current_share.share)
        return original.forward(self, x)

    return subclass_with_forward(original, SynchronizedMarker, forward)


def _normalize(layer: BatchNorm, x: Tensor, share: BatchShare) -> Tensor:
    check_input_dimensions(layer, x)
    statistics = gather_statistics(x.detach(), has_samples=share.count > 0)
    _update_running_statistics(layer, statistics)
    relative = share.weight * dist.get_world_size()
    apply = cast(Callable[..., Tensor], GlobalBatchNorm.apply)
    return apply(x, layer.weight, layer.bias, statistics, layer.eps, relative)


def gather_statistics(x: Tensor, *, has_samples: bool) -> BatchStatistics:
    """Return the statistics of ``x`` [n, channels, ...] over all ranks with samples.

    Zeros if no rank has samples: a micro-batch of a batch with fewer samples than micro-batches.
    Computed in fp32, or in fp64 for fp64.
    """
    channels = x.shape[1]
    count = x.numel() // channels if has_samples else 0
    own = x.new_zeros(2 * channels + 1, dtype=torch.promote_types(x.dtype, torch.float32))
    if count:
        wide = x if x.is_cuda else x.to(own.dtype)
        moments = torch.batch_norm_update_stats(wide, None, None, 0.0)
        own = torch.cat([*moments, own.new_full((1,), count)])
    every = own.new_empty(dist.get_world_size() * len(own))
    ALL_GATHER(every, own)
    means, variances, counts = torch.split(every.view(-1, len(own)), [channels, channels, 1], dim=1)
    total = counts.sum(0)
    weights = counts / total.clamp(min=1)
    mean = (weights * means).sum(0)
    variance = (weights * (variances + (means - mean).square())).sum(0)
    return BatchStatistics(mean, variance, total)


@torch.no_grad()
def _update_running_statistics(layer: BatchNorm, statistics: BatchStatistics) -> None:
    if layer.running_mean is None or layer.running_var is None:
        return
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(statistics.count[0] > 0)
    unbiased = statistics.variance * (statistics.count / (statistics.count - 1).clamp(min=1))
    for running, new in ((layer.running_mean, statistics.mean), (layer.running_var, unbiased)):
        momentum: Any = layer.momentum
        if momentum is None:
            batches = cast(Tensor, layer.num_batches_tracked)
            momentum = batches.clamp(min=1).to(running.dtype).reciprocal()
        weight = momentum * (statistics.count > 0).to(running.dtype)
        running.lerp_(new.to(running.dtype), weight)


class GlobalBatchNorm(torch.autograd.Function):
    """``x`` normalised by the global statistics, with the gradient through them.

    ``relative`` is the weight of this rank's gradient over that of an even share. Gradients of
    other ranks are divided by it here, because this rank's gradient is weighted later. A rank
    whose samples do not count gets none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: BatchStatistics,
        eps: float,
        relative: float,
    ) -> Tensor:
        mean, variance = statistics.mean, statistics.variance
        inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse, statistics.count)
        ctx.relative = relative
        slope, offset = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        return nn.functional.batch_norm(x, mean, variance, slope, offset, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        dy = dy.contiguous(memory_format=_memory_format(x))
        sums = _gradient_sums(dy, x, mean, inverse)
        of_x = None
        if ctx.needs_input_grad[0]:
            summed = torch.cat(sums)
            summed = summed if ctx.relative == 1 else summed * ctx.relative
            dist.all_reduce(summed)
            if ctx.relative != 1:
                summed = summed * (1 / ctx.relative if ctx.relative else 0.0)
            of_x = _input_gradient(dy, x, (weight, mean, inverse), summed / count)
        of_weight = (sums[1] * inverse).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = sums[0].to(dy.dtype if weight is None else weight.dtype)
        return of_x, of_weight, of_bias if ctx.needs_input_grad[2] else None, None, None, None


def _gradient_sums(dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        return torch.batch_norm_backward_reduce(  # one pass over both
            dy, x, mean, inverse, None, True, False, False
        )[:2]
    dims = [dim for dim in range(x.dim()) if dim != 1]
    wide = dy.to(mean.dtype)
    return wide.sum(dims), (wide * (x - _broadcast_channels(mean, x))).sum(dims)


def _input_gradient(
    dy: Tensor, x: Tensor, layer: tuple[Tensor | None, Tensor, Tensor], means: Tensor
) -> Tensor:
    """``means`` [2 · channels] are the two sums over all ranks over the global count."""
    weight, mean, inverse = layer
    of_dy, of_product = means.chunk(2)
    if x.is_cuda:
        wide = None if weight is None else weight.to(mean.dtype)
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(dy, x, mean, inverse, wide, of_dy, of_product, one)
    slope = _broadcast_channels(inverse.square() * of_product, x)
    shared = _broadcast_channels(of_dy, x) + (x - _broadcast_channels(mean, x)) * slope
    scale = inverse if weight is None else inverse * weight
    return ((dy - shared) * _broadcast_channels(scale, x)).to(x.dtype)


def _broadcast_channels(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *(1,) * (x.dim() - 2))


def _memory_format(x: Tensor) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(x.dim())
    dense = last is not None and x.is_contiguous(memory_format=last)
    return last if last is not None and dense else torch.contiguous_format
