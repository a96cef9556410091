"""Hooks of modules: forward calls, compilation, channels_last weights."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import quantiles
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from nfold.core.errors import Unsupported
from nfold.core.script_profile import Recompilation
from nfold.core.source_location import display_filename
from nfold.instrument import torch_private
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.input.batch_tensors import iter_tensors, sample_count


class ModuleCallHooks:
    """Global hooks before and after every module call, between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def start(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._before_call),
            register_module_forward_hook(self._after_call, always_call=True),
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_call(self, module: nn.Module, args: Any) -> None:
        raise NotImplementedError

    def _after_call(self, module: nn.Module, args: Any, output: Any) -> None:
        raise NotImplementedError


IMAGE_DIMENSIONS = 4  # of images and of the weights of a convolution [out, in, h, w]
HALF_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# called when an observed model begins to train on a batch
FORWARD_LISTENERS: list[Callable[[], None]] = []


class ForwardObserver(ModuleCallHooks):
    """Observes the calls of modules that train.

    ``on_model_input`` gets the inputs of each outermost module; ``on_forward`` is called before it,
    and ``on_outermost`` with it.
    """

    def __init__(
        self,
        on_model_input: Callable[[Any], None] = lambda _: None,
        on_forward: Callable[[], None] = lambda: None,
        on_outermost: Callable[[nn.Module], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._on_outermost = on_outermost
        self._on_model_input = on_model_input
        self._on_forward = on_forward
        self._outermost: dict[int, nn.Module] = {}
        self.model: Any = None
        self.autocast: str | None = None
        self.channels_last = False
        self.draws_random_numbers = False
        self._random_states: list[Tensor] = []  # before the call of an outermost module
        self._samples: Counter[int] = Counter()
        self._depth = 0
        self._keyword_models: set[int] = set()

    @property
    def outermost(self) -> tuple[nn.Module, ...]:
        return tuple(self._outermost.values())

    def take_sample_count(self) -> int:
        """Return the samples since the last call: the largest count of any module.

        Modules may get the outputs of each other, or parts of the same batch.
        """
        samples = max(self._samples.values(), default=0)
        self._samples.clear()
        return samples

    def keep_outermost_hooks(self) -> None:
        """Keep hooks on the outermost modules only, so that calls inside them cost nothing.

        Skips modules that torch.compile compiles with their hooks, and TorchScript modules.
        """
        self.stop()
        FORWARD_LISTENERS.append(self._on_forward)
        for module in self._outermost.values():
            if not torch_private.is_compiled(module) and not isinstance(
                module, torch.jit.ScriptModule
            ):
                self._handles.append(module.register_forward_pre_hook(notify_forward))

    @property
    def keeps_hooks(self) -> bool:
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
            self._on_outermost(module)
            self._on_forward()
            self._random_states = [] if self.draws_random_numbers else random_states()
            samples = sample_count(args)
            self._count_samples(module, args, samples)
            if not samples and id(module) not in self._keyword_models:
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
        if torch.compiler.is_compiling():
            return
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._random_states:
            before, self._random_states = self._random_states, []
            pairs = zip(before, random_states(), strict=False)
            self.draws_random_numbers = any(not torch.equal(*pair) for pair in pairs)

    def _record_precision(self, args: Any) -> None:
        first = next(iter_tensors(args), None)
        if first is None:
            return
        device = first.device.type
        if torch.is_autocast_enabled(device):
            self.autocast = HALF_PRECISIONS.get(torch.get_autocast_dtype(device))
        if first.dim() == IMAGE_DIMENSIONS and not first.is_contiguous():
            self.channels_last |= first.is_contiguous(memory_format=torch.channels_last)


def notify_forward(module: nn.Module, _args: Any) -> None:
    """Call the forward listeners if the module trains.

    A module-level function: a deep copy of the model must not copy state of nfold.
    """
    if torch.is_grad_enabled() and _any_in_training_mode(module):
        for listener in FORWARD_LISTENERS:
            listener()


def random_states() -> list[Tensor]:
    """Return the states of the random generators of the host and of the current GPU.

    The list is empty while a CUDA graph is recorded: PyTorch forbids to read them.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [torch.get_rng_state()]
    if torch.cuda.is_current_stream_capturing():
        return []
    return [torch.get_rng_state(), torch.cuda.get_rng_state()]


def is_training(module: nn.Module) -> bool:
    """Return whether the module is in training mode and has a parameter that requires gradients."""
    has_gradients = any(parameter.requires_grad for parameter in module.parameters())
    return has_gradients and _any_in_training_mode(module)


def _any_in_training_mode(module: nn.Module) -> bool:
    return any(part.training for part in module.modules())


# class names: their packages need not be installed
WRAPPER_CLASSES = {"DistributedDataParallel", "LightningModule", "_FabricModule"}


class OutermostModuleHooks(ModuleCallHooks):
    """Global hooks around modules, without wrappers; also before the outermost ones that train."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def _before_call(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or is_wrapper(module):
            return
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and is_training(module):
            self._before_outermost(module)

    def _after_call(self, module: nn.Module, _args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or is_wrapper(module):
            return None
        self._depth = max(0, self._depth - 1)
        return self._after_module(module, output)

    def _before_outermost(self, module: nn.Module) -> None:
        raise NotImplementedError

    def _after_module(self, module: nn.Module, output: Any) -> Any:
        """Return another output of a module that is no wrapper, or None."""


class ModelCompiler(OutermostModuleHooks):
    """Compiles the ``forward`` of each outermost module that trains, from its second call on.

    ``mode`` is a mode of torch.compile; an empty mode does nothing. Hooks and wrappers stay as they
    are. DistributedDataParallel and Lightning modules are not compiled, the modules in them are.
    """

    def __init__(self, mode: str) -> None:
        super().__init__()
        self._mode = mode
        self._compiled: WeakSet[nn.Module] = WeakSet()

    def start(self) -> None:
        if self._mode:
            super().start()

    def require_compiled(self, *, compiled: bool) -> None:
        """Raise Unsupported if compilation was requested and nothing is compiled."""
        if self._mode and not compiled:
            raise Unsupported("compiled: no module of the script could be compiled")

    def _before_outermost(self, module: nn.Module) -> None:
        if module not in self._compiled:
            self._compiled.add(module)
            module.forward = CompiledForward(module, self._mode)

    @property
    def has_compiled(self) -> bool:
        return bool(self._compiled)


class CompiledForward:
    """The compiled ``forward`` of a module, as an attribute of the module.

    A copy of the module, or a module that was saved whole, has its own ``forward``, not compiled: the
    bound method of the original would compute with the parameters of the original.
    """

    def __init__(self, module: nn.Module, mode: str) -> None:
        functools.update_wrapper(self, module.forward)
        self._module = module
        self._compiled = torch.compile(module.forward, mode=mode)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")


def is_wrapper(module: nn.Module) -> bool:
    return any(cls.__name__ in WRAPPER_CLASSES for cls in type(module).__mro__)


MIN_STEPS_COMPILED = 4  # in which something is compiled, of the steps after the first ones
FIRST_STEPS = 2  # may compile anyway


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


class RecompilationCheck:
    """Notices code that torch.compile compiles again in every step."""

    def __init__(self) -> None:
        self._graphs: list[int] = []

    def on_step(self) -> None:
        self._graphs.append(compiled_graphs())

    def found(self) -> Recompilation | None:
        """Return what is compiled again, if almost every step compiles."""
        graphs = self._graphs[FIRST_STEPS:]
        compiles = [after > before for before, after in pairwise(graphs)]
        if sum(compiles) < max(MIN_STEPS_COMPILED, len(compiles) - 1):
            return None
        dynamo: Any = sys.modules["torch._dynamo.utils"]
        metrics = [one for one in dynamo.get_compilation_metrics() if one.recompile_reason]
        if len(metrics) < MIN_STEPS_COMPILED:
            return None
        last = metrics[-1]
        per_step = (graphs[-1] - graphs[0]) / len(compiles)
        each = [1e3 * per_step * (one.entire_frame_compile_time_s or 0.0) for one in metrics]
        low, middle, high = quantiles(each, n=4, method="inclusive")
        return Recompilation(
            function=str(last.co_name),
            location=f"{display_filename(str(last.co_filename))}:{last.co_firstlineno}",
            guard=str(last.recompile_reason).partition(": ")[2].partition("#")[0].strip(),
            step_ms=(middle, low, high),
        )

    def caveats(self) -> tuple[tuple[str, str], ...]:
        """Return a caveat with the function and the guard that failed."""
        found = self.found()
        if found is None:
            return ()
        because = f" because {found.guard} holds for one step only" if found.guard else ""
        text = (
            f"{found.function} ({found.location}) is compiled again in every step{because}; next: "
            "pass changing numbers as tensors"
        )
        return (("recompilation", text),)


class ChannelsLastWeights:
    """Converts the weights of convolutions to channels_last.

    Converts before a wrapper builds its buckets and an optimizer its state. A convolution computes
    in channels_last if its weights or its images are channels_last, and later operators keep it.
    """

    def __init__(self) -> None:
        self.has_converted = False

    def install(self, patches: Patches) -> None:
        for wrapper in (DistributedDataParallel, DataParallel):
            patches.wrap(wrapper, "__init__", self._construct_wrapper)
        patches.wrap(Optimizer, "add_param_group", self._add_param_group)

    def _construct_wrapper(self, original: Any, wrapper: Any, /, *args: Any, **kwargs: Any) -> None:
        module = args[0] if args else kwargs.get("module")
        if isinstance(module, nn.Module):
            self._convert(module.parameters())
        original(wrapper, *args, **kwargs)

    def _add_param_group(
        self, original: Any, optimizer: Optimizer, param_group: dict[str, Any]
    ) -> None:
        original(optimizer, param_group)
        self._convert(param_group["params"])

    def _convert(self, parameters: Iterable[Tensor]) -> None:
        """Convert in place: the parameters stay the same objects."""
        for parameter in parameters:
            if not is_lazy(parameter) and parameter.dim() == IMAGE_DIMENSIONS:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
                self.has_converted = True
