"""Every call of every module of a process, by whomever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from nfold.core.errors import Unsupported
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.input.batch_tensors import iter_tensors, sample_count


class ModuleCallHooks:
    """Is told of calls while it is started; ``stop`` leaves no hook behind."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def start(self) -> None:
        """Be told of every call from now on."""
        self._handles = [
            register_module_forward_pre_hook(self._before_call),
            register_module_forward_hook(self._after_call, always_call=True),
        ]

    def stop(self) -> None:
        """Be told of no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_call(self, module: nn.Module, args: Any) -> None:
        raise NotImplementedError

    def _after_call(self, module: nn.Module, args: Any, output: Any) -> None:
        raise NotImplementedError


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
        if self._depth == 1 and torch.is_grad_enabled() and not sample_count(args):
            self._count_samples(module, kwargs, sample_count(kwargs))

    def _count_samples(self, module: nn.Module, inputs: Any, count: int) -> None:
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
    return any(one.training for one in module.modules())


def _is_channels_last(tensor: Tensor) -> bool:
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)


# The model of a script compiled, where an experiment wants it so.
#
# Each of a script's outermost modules that train is: its ``forward``, from its second call on, so
# that hooks and what its wrappers do stay what they are. DistributedDataParallel and Lightning's
# modules call others; those are the outermost ones.

WRAPPER_CLASSES = {"DistributedDataParallel", "LightningModule", "_FabricModule"}
"""Names of classes, so that none of their packages is needed."""


class ModelCompiler(ModuleCallHooks):
    """Compiles in a ``mode`` of torch.compile; in none, does nothing."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self._mode = mode
        self._depth = 0
        self._compiled: list[nn.Module] = []

    def start(self) -> None:
        if self._mode:
            super().start()

    def require_compiled(self, *, compiled: bool) -> None:
        """Raise Unsupported where it was to be compiled, and nothing is."""
        if self._mode and not compiled:
            raise Unsupported("compiled: no module of the script could be compiled")

    def _before_call(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or _is_wrapper(module):
            return
        self._depth += 1
        if self._depth > 1 or not torch.is_grad_enabled() or not is_training(module):
            return
        if not any(module is one for one in self._compiled):
            self._compiled.append(module)
            module.forward = torch.compile(module.forward, mode=self._mode)

    def _after_call(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling() and not _is_wrapper(module):
            self._depth = max(0, self._depth - 1)


def _is_wrapper(module: nn.Module) -> bool:
    return any(one.__name__ in WRAPPER_CLASSES for one in type(module).__mro__)


# The weights of a script's convolutions in channels_last, where an experiment wants them so.
#
# They are put in this order before anything holds on to the one they had: a wrapper's buckets and an
# optimizer's state are made after it. A convolution computes in channels_last where its weights or
# its images are, and what follows keeps to it.

IMAGE_DIMENSIONS = 4
"""Dimensions of a convolution's weights [out, in, h, w], as of its images."""


def install_channels_last(patches: Patches) -> None:
    """In whatever is wrapped or optimised from now on."""
    for wrapper in (DistributedDataParallel, DataParallel):
        patches.put(wrapper, "__init__", _wrap_wrapper_init)
    patches.put(Optimizer, "add_param_group", _wrap_add_param_group)


def _wrap_wrapper_init(usual: Any) -> Any:
    def construct(wrapper: Any, /, *args: Any, **kwargs: Any) -> None:
        module = args[0] if args else kwargs.get("module")
        if isinstance(module, nn.Module):
            convert_to_channels_last(module.parameters())
        usual(wrapper, *args, **kwargs)

    return construct


def _wrap_add_param_group(usual: Any) -> Any:
    def add(optimizer: Optimizer, group: dict[str, Any]) -> None:
        usual(optimizer, group)
        convert_to_channels_last(group["params"])

    return add


def convert_to_channels_last(parameters: Iterable[Tensor]) -> None:
    """In place: a parameter stays the object that it is."""
    for parameter in parameters:
        if not is_lazy(parameter) and parameter.dim() == IMAGE_DIMENSIONS:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
