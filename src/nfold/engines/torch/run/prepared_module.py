"""The preparation of a user's module: where and how its forward pass is computed.

A prepared module stays the user's own object with its names, methods and state_dict: its class
becomes a subclass whose forward moves the inputs and computes under autocast, as PyTorch's
fully_shard does. A copy or a pickle of it is of the user's class.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nfold.core.plan import Plan
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.batch_norm import synchronize_batch_norm
from nfold.engines.torch.input.dataloader import to_device
from nfold.engines.torch.layout import (
    MEMORY_FORMATS,
    ChangedForward,
    apply_layout,
    subclass_with_forward,
)
from nfold.engines.torch.nested_tensors import collect_tensors, map_tensors
from nfold.engines.torch.precision import AUTOCAST
from nfold.engines.torch.run.deferred_cast import defer_cast
from nfold.engines.torch.step.compiled_graphs import CompiledGraphs

DEFERRED_NUMBERS = 2**20  # smaller outputs are cast at once


class Reference(Protocol):
    """Outputs that those of a compiled forward pass are compared with."""

    def describe_difference(self, outputs: Any) -> str | None: ...


class PreparedMarker(ChangedForward):
    prepared_forward: PreparedForward


class PreparedForward:
    """The forward pass of one prepared module.

    Attributes:
        step: ``eager``, ``compiled``, or ``compiled+captured``: compiled, and its calls in training
            replayed as CUDA graphs.
        failure: why the compiled forward pass is not used, or None.
        graphs: the CUDA graphs of the compiled forward pass, if there are any.
        reference: computes a reference for the first compiled outputs from (this, module, args,
            kwargs); a difference is a failure.
    """

    def __init__(self, forward: Callable[..., Any], plan: Plan, device: torch.device) -> None:
        self._implementations: dict[str, Callable[..., Any]] = {"eager": forward}
        self._proven: set[str] = {"eager"}
        self.device = device
        self.precision = plan.precision or "fp32"
        self._half = AUTOCAST.get(self.precision)
        self.layout = plan.layout
        self.step = "compiled" if "compiled" in (plan.step or "") else "eager"
        self.compiles_evaluation = self.step == "compiled"
        self.failure: str | None = None
        self.reference: Callable[..., Reference] | None = None
        self.graphs: CompiledGraphs | None = None

    def select_step(self, step: str) -> None:
        """Compute as ``step`` says from the next call on; eagerly if compilation failed before."""
        self.step = "eager" if self.failure else step

    def settle_on(self, step: str) -> None:
        """Compute as ``step`` says for good, and free the graphs if it has none."""
        self.select_step(step)
        if self.graphs is not None and "captured" not in step:
            self.graphs.close()

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        memory = MEMORY_FORMATS["channels_last"] if self.layout == "channels_last" else None
        args, kwargs = to_device((args, kwargs), self.device, memory)
        trains = module.training and torch.is_grad_enabled()
        step = self.step if trains or self.compiles_evaluation else "eager"
        return self._finish(self._attempt(step, module, args, kwargs))

    def _attempt(self, step: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if step in self._proven:
            return self._compute(step, args, kwargs)
        reference = self.reference and self.reference(self, module, args, kwargs)
        try:
            outputs = self._compute(step, args, kwargs)
            reason = reference.describe_difference(outputs) if reference else None
        except Exception as error:  # the eager pass raises an error of the module itself
            if reference is None and isinstance(error, torch.OutOfMemoryError):
                raise
            lines = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
        if reason is None:
            self._proven.add(step)
            return outputs
        self.failure = reason
        self.step, self.compiles_evaluation = "eager", False
        if reference is None:
            warnings.warn(
                f"{type(module).__name__} runs eagerly: it cannot be compiled ({reason})",
                stacklevel=5,
            )
        return self._compute("eager", args, kwargs)

    def _compute(self, step: str, args: Any, kwargs: Any) -> Any:
        function = self._implementation(step)
        if self._half is None:
            return function(*args, **kwargs)
        with torch.autocast(self.device.type, dtype=self._half):
            return function(*args, **kwargs)

    def _implementation(self, step: str) -> Callable[..., Any]:
        if "captured" in step and self.graphs is None:
            self.graphs = CompiledGraphs(self.device)
            self._implementations["compiled"] = self.graphs.compile(self._implementations["eager"])
        if self.graphs is not None:
            self.graphs.is_used = "captured" in step
        name = "eager" if step == "eager" else "compiled"
        if name not in self._implementations:
            self._implementations[name] = torch.compile(self._implementations["eager"])
        return self._implementations[name]

    def compute_eagerly(self, args: Any, kwargs: Any) -> Any:
        """Return the outputs of the module's own forward, in the types that it computes in."""
        return self._compute("eager", args, kwargs)

    def _finish(self, outputs: Any) -> Any:
        """Return the outputs in fp32; what a model returns beside its loss is cast when it is read."""
        if self._half is None:
            return outputs
        has_loss = any(out.dim() == 0 and out.requires_grad for out in collect_tensors(outputs))

        def finish(out: Tensor) -> Tensor:
            if out.dtype != self._half:
                return out
            is_deferred = has_loss and out.numel() >= DEFERRED_NUMBERS
            return defer_cast(out) if is_deferred else out.float()

        return map_tensors(outputs, finish)


def prepared_forward(module: nn.Module) -> PreparedForward:
    """Return the forward pass of a prepared module."""
    assert isinstance(module, PreparedMarker)
    return module.prepared_forward


def _run_forward(prepared: PreparedForward, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return prepared.run(module, args, kwargs)


def prepare_module(
    module: nn.Module, plan: Plan, device: torch.device, current_share: CurrentShare | None = None
) -> nn.Module:
    """Return the same module, moved to ``device`` and prepared for the complete ``plan``.

    A prepared module only moves. ``current_share`` is this rank's share of each step; without it
    all ranks count the same.
    """
    module.to(device)
    if isinstance(module, PreparedMarker):
        return module
    if plan.layout == "channels_last":
        apply_layout(module, plan.layout)
    synchronize_batch_norm(module, plan, current_share or CurrentShare(plan.devices or 1))
    original = type(module)
    if "forward" in vars(module):  # torch.compile(module), or a forward that the script replaced
        prepared_forward = PreparedForward(module.forward, plan, device)
        module.forward = partial(_run_forward, prepared_forward, module)
    else:
        prepared_forward = PreparedForward(original.forward, plan, device)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return prepared_forward.run(self, (self, *args), kwargs)

    prepared = subclass_with_forward(original, PreparedMarker, forward)
    prepared.prepared_forward = prepared_forward  # type: ignore[attr-defined]
    module.__class__ = prepared
    return module
