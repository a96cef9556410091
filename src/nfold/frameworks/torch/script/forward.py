"""A script's first forwards: their model, what they compute in, and samples without a loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nfold.frameworks.torch.script.batches import count_of, tensors_of
from nfold.frameworks.torch.script.calls import Calls

HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Forward(Calls):
    """Looks at calls of modules that train; ``fed`` gets what they are called with."""

    def __init__(self, fed: Callable[[Any], None] = lambda _: None) -> None:
        super().__init__()
        self._fed = fed
        self.model: Any = None
        self.autocast: str | None = None
        self.channels_last = False
        self.samples = 0
        self._depth = 0
        self._by_name: set[int] = set()

    def taken(self) -> int:
        """Samples that went through the model since the last call."""
        samples, self.samples = self.samples, 0
        return samples

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if not torch.is_grad_enabled():
            return
        self._note_type(args)
        if self._depth == 1 and trains(module):
            self.model = module
            found = count_of(args)
            self.samples += found
            self._fed(args)
            if not found and id(module) not in self._by_name:
                self._by_name.add(id(module))
                self._handles.append(
                    module.register_forward_pre_hook(self._before_by_name, with_kwargs=True)
                )

    def _before_by_name(self, _module: nn.Module, args: Any, named: Any) -> None:
        """A model that gets its samples by name tells them here, from its second call on."""
        if self._depth == 1 and torch.is_grad_enabled() and not count_of(args):
            self.samples += count_of(named)
            self._fed(named)

    def _after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth = max(0, self._depth - 1)

    def _note_type(self, args: Any) -> None:
        first = next(tensors_of(args), None)
        if first is None:
            return
        kind = first.device.type
        if torch.is_autocast_enabled(kind):
            self.autocast = HALVES.get(torch.get_autocast_dtype(kind))
        self.channels_last = self.channels_last or _is_channels_last(first)


def trains(module: nn.Module) -> bool:
    """Lightning leaves its wrapper in the mode of evaluation, while what it wraps trains."""
    some = any(parameter.requires_grad for parameter in module.parameters())
    return some and any(one.training for one in module.modules())


def _is_channels_last(tensor: Tensor) -> bool:
    """Of images [n, c, h, w] whose two layouts differ."""
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)
