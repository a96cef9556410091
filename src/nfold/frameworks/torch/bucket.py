"""Gradients that travel together, one after the other in one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nfold.errors import UsageError

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
    """Whether a gradient lies in its memory as its part of a bucket will, and is not it."""
    axes = zip(view.shape, view.stride(), gradient.stride(), strict=True)
    alike = all(size == 1 or mine == its for size, mine, its in axes)
    return alike and gradient.dtype == view.dtype and not _same_memory(view, gradient)
