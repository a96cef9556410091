"""A script's first forwards: their model, what they compute in, and samples without a loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nfold.frameworks.torch.script.batches import iter_tensors, sample_count
from nfold.frameworks.torch.script.calls import ModuleCallHooks

HALF_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
FORWARD_LISTENERS: list[Callable[[], None]] = []
"""Called when a model begins to train on a batch, which is followed."""


class ForwardObserver(ModuleCallHooks):
    """Looks at calls of modules that train; ``fed`` gets what they are called with.

    ``begins`` is called before each of the outermost; after ``stop``, where they are followed.
    """

    def __init__(
        self,
        on_model_input: Callable[[Any], None] = lambda _: None,
        on_forward: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._on_model_input = on_model_input
        self._on_forward = on_forward
        self._outermost: dict[int, nn.Module] = {}
        self.model: Any = None
        self.autocast: str | None = None
        self.channels_last = False
        self._samples: Counter[int] = Counter()
        self._depth = 0
        self._keyword_models: set[int] = set()

    @property
    def outermost(self) -> tuple[nn.Module, ...]:
        """All that were called to train, in the order of their first calls."""
        return tuple(self._outermost.values())

    def take_sample_count(self) -> int:
        """Samples since the last call: those of the module that got most of them.

        What one module makes of them another one may get, or two get parts of the same ones.
        """
        samples = max(self._samples.values(), default=0)
        self._samples.clear()
        return samples

    def keep_outermost_hooks(self) -> None:
        """Be told only when one of the outermost that were seen is called, at no cost inside it.

        None that torch.compile compiles as a whole, with its hooks, and none of TorchScript's.
        """
        self.stop()
        FORWARD_LISTENERS.append(self._on_forward)
        for module in self._outermost.values():
            whole = getattr(module, "_compiled_call_impl", None) is not None
            if not whole and not isinstance(module, torch.jit.ScriptModule):
                self._handles.append(module.register_forward_pre_hook(notify_forward))

    @property
    def keeps_hooks(self) -> bool:
        """Whether it is told of any."""
        return self._on_forward in FORWARD_LISTENERS and bool(self._handles)

    def stop(self) -> None:
        """Be told of no more."""
        super().stop()
        if self._on_forward in FORWARD_LISTENERS:
            FORWARD_LISTENERS.remove(self._on_forward)

    def _before_call(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if not torch.is_grad_enabled():
            return
        self._record_precision(args)
        if self._depth == 1 and is_training(module):
            self.model = self._outermost[id(module)] = module
            self._on_forward()
            found = sample_count(args)
            self._count_samples(module, args, found)
            if not found and id(module) not in self._keyword_models:
                self._keyword_models.add(id(module))
                self._handles.append(
                    module.register_forward_pre_hook(self._before_keyword_call, with_kwargs=True)
                )

    def _before_keyword_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A model that gets its samples by name tells them here, from its second call on."""
        if self._depth == 1 and torch.is_grad_enabled() and not sample_count(args):
            self._count_samples(module, kwargs, sample_count(kwargs))

    def _count_samples(self, module: nn.Module, inputs: Any, count: int) -> None:
        """So many samples, unless another module has computed them."""
        first = next((tensor for tensor in iter_tensors(inputs) if tensor.dim()), None)
        if first is None or first.grad_fn is None:
            self._samples[id(module)] += count
            self._on_model_input(inputs)

    def _after_call(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth = max(0, self._depth - 1)

    def _record_precision(self, args: Any) -> None:
        first = next(iter_tensors(args), None)
        if first is None:
            return
        kind = first.device.type
        if torch.is_autocast_enabled(kind):
            self.autocast = HALF_PRECISIONS.get(torch.get_autocast_dtype(kind))
        self.channels_last = self.channels_last or _is_channels_last(first)


def notify_forward(module: nn.Module, _args: Any) -> None:
    """The hook of a model: a function, so that a copy of the model has nothing else of nfold's."""
    if torch.is_grad_enabled() and _any_in_training_mode(module):
        for begins in FORWARD_LISTENERS:
            begins()


def is_training(module: nn.Module) -> bool:
    """Whether it does, and not only computes."""
    some = any(parameter.requires_grad for parameter in module.parameters())
    return some and _any_in_training_mode(module)


def _any_in_training_mode(module: nn.Module) -> bool:
    """Lightning leaves its wrapper in the mode of evaluation, while what it wraps trains."""
    return any(one.training for one in module.modules())


def _is_channels_last(tensor: Tensor) -> bool:
    """Of images [n, c, h, w] whose two layouts differ."""
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)
