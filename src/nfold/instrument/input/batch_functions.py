"""Functions of the script's own that make its batches, where no DataLoader does.

They are found in the warm-up: the last one that returned what a model was then called with, and
before it those that made what it was given on the host. What a function made of something that has
a gradient is a state that a model hands on to itself, and no batch. From then on their code is
another one, which gives what they returned first again where a step's input is left out.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from nfold.core.script_profile import BatchFunction
from nfold.core.source_location import display_filename, is_user_code
from nfold.engines.interleaver import ActiveVariant
from nfold.instrument.hooks.patches import GeneratorBatches, function_key, installed_generator_hooks
from nfold.instrument.input.batch_tensors import BatchReplay, iter_tensors, origins

OBSERVED_STEPS = 3
"""In which every return of a function is looked at: that takes time, and no step of it is timed."""
MAX_RETURNS = 256
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")
"""Comprehensions, functions until Python 3.12: nobody else calls them."""
GENERATOR_EXPRESSION = "<genexpr>"
ASYNC_FLAGS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True)
class ReturnedBatch:
    """What a function of the user's returned, without keeping it; ``before`` returned what this one
    was given.
    """

    code: CodeType
    source: ReturnedBatch | None
    tensors: tuple[weakref.ref[Tensor], ...]
    inputs_on_device: bool
    on_device: bool
    grad_enabled: bool


class BatchFunctionHooks:
    """Finds the functions (``begin`` to ``stop``), and stands in their place (``replace``)."""

    def __init__(
        self,
        variant: ActiveVariant,
        new_replay: Callable[[], BatchReplay],
        on_batch_request: Callable[[], None],
    ) -> None:
        self._variant = variant
        self._new_replay = new_replay
        self._on_batch_request = on_batch_request
        self._returned: deque[ReturnedBatch] = deque(maxlen=MAX_RETURNS)
        self._inputs: dict[int, list[Tensor]] = {}
        self._calls: Counter[CodeType] = Counter()
        self._candidates: dict[tuple[CodeType, ...], tuple[ReturnedBatch, ...]] = {}
        self._state_functions = set[CodeType]()
        self._state: deque[weakref.ref[Tensor]] = deque(maxlen=MAX_RETURNS)
        self._steps = 0
        self._chain: tuple[ReturnedBatch, ...] = ()
        self._replaced: list[tuple[FunctionType, CodeType]] = []
        self._replays: dict[object, BatchReplay] = {}
        self._observing = False

    def start(self) -> None:
        """Look at what functions return; unless somebody else looks at them already."""
        if sys.getprofile() is None:
            self._observing = True
            sys.setprofile(self._on_profile_event)

    def on_step(self) -> None:
        """A step was made."""
        if self._observing:
            self._steps += 1
            if self._steps == OBSERVED_STEPS:
                self.stop()

    def stop(self) -> None:
        """Look no more."""
        if not self._observing:
            return
        sys.setprofile(None)
        self._observing = False
        self._returned.clear()
        self._inputs.clear()
        fed = [
            made for codes, made in self._candidates.items() if not self._state_functions & {*codes}
        ]
        # Of several functions that each make a part none is the batch's.
        if len(fed) == 1:
            (found,) = fed
            if all(map(self._is_replaceable, found)):
                self._chain = found

    def _is_replaceable(self, one: ReturnedBatch) -> bool:
        if not _is_generator(one.code):
            return not one.code.co_flags & ASYNC_FLAGS
        generators = installed_generator_hooks()
        defined = generators is not None and one.code in generators.decorated
        return defined or self._variant.is_baseline("input")

    def _on_profile_event(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not is_user_code(code.co_filename):
            return
        if code.co_name in COMPREHENSIONS:
            return
        if event == "call":
            values = list(frame.f_locals.values())
            # What gets a module, or is a method of one, computes with it.
            if not any(isinstance(one, nn.Module) for one in values):
                # What goes on has its last batch at hand, of which the next is not made.
                at_hand = [] if _is_generator(code) else list(iter_tensors(values))
                self._inputs[id(frame)] = at_hand
            return
        given, tensors = self._inputs.pop(id(frame), None), list(iter_tensors(value))
        if any(one.requires_grad for one in given or ()):
            self._state_functions.add(code)
            self._state.extend(map(weakref.ref, tensors))
            return
        if code.co_name == GENERATOR_EXPRESSION and self._latest_return(tensors) is not None:
            # It hands on what another function made: (one.to(device) for one in get_batch()).
            return
        if given is not None and tensors and not any(one.requires_grad for one in tensors):
            self._calls[code] += 1
            self._returned.append(
                ReturnedBatch(
                    code=code,
                    source=self._latest_return(given),
                    tensors=tuple(map(weakref.ref, tensors)),
                    inputs_on_device=any(map(_on_device, given)),
                    on_device=all(map(_on_device, tensors)),
                    grad_enabled=torch.is_grad_enabled(),
                )
            )

    def on_model_input(self, inputs: Any) -> None:
        """A model that trains is called with this: with a batch, and what it hands on to itself."""
        if not self._observing:
            return
        state = {id(ref()) for ref in self._state}
        batch = (one for one in iter_tensors(inputs) if id(one) not in state)
        one, made = self._latest_return(batch), list[ReturnedBatch]()
        while one is not None:
            # What changes batches on a device is its work, not the host's.
            made = made if one.inputs_on_device else [one, *made]
            one = one.source
        if made:
            self._candidates[tuple(one.code for one in made)] = tuple(made)

    def _latest_return(self, tensors: Iterable[Tensor]) -> ReturnedBatch | None:
        wanted = {id(one) for tensor in tensors for one in origins(tensor)}
        for one in reversed(self._returned) if wanted else ():
            if any(id(ref()) in wanted for ref in one.tensors):
                return one
        return None

    @property
    def batch_function(self) -> BatchFunction | None:
        """The functions, as they are told to a person."""
        if not self._chain:
            return None
        code = self._chain[0].code
        return BatchFunction(
            names=tuple(one.code.co_name for one in self._chain),
            defined_at=f"{display_filename(code.co_filename)}:{code.co_firstlineno}",
            on_device=self._chain[-1].on_device,
            generator_functions=tuple(
                function_key(one.code) for one in self._chain if _is_generator(one.code)
            ),
        )

    @property
    def batches_per_step(self) -> int:
        """Batches of a step, 0 where no function makes them."""
        calls = self._calls[self._chain[0].code] if self._chain else 0
        return round(calls / max(1, self._steps))

    @property
    def replays(self) -> tuple[BatchReplay, ...]:
        """What gives first batches again."""
        return tuple(self._replays.values())

    def install_replacements(self) -> None:
        """Stand in the functions' place, if their batches are left out at any time."""
        if self._variant.is_baseline("input"):
            return
        generators = installed_generator_hooks()
        for one in self._chain:
            if _is_generator(one.code):
                assert generators is not None
                generators.replacements[one.code] = functools.partial(self._next_yield, one)
                continue
            for function in gc.get_referrers(one.code):
                if isinstance(function, FunctionType) and function.__code__ is one.code:
                    self._replaced.append((function, one.code))
                    _replace_code(function, functools.partial(self._next_batch, one))

    def restore_functions(self) -> None:
        """Let the script have its function back."""
        while self._replaced:
            function, code = self._replaced.pop()
            function.__code__ = code
            del function.__globals__[_replacement_name(function)]

    def _next_batch(
        self, returned: ReturnedBatch, original: FunctionType, *args: Any, **kwargs: Any
    ) -> Any:
        if self._uses_real_batch(returned):
            return original(*args, **kwargs)
        return self._replayed_batch(
            returned, args, (original(*args, **kwargs) for _ in itertools.count())
        )

    def _next_yield(self, returned: ReturnedBatch, batches: GeneratorBatches) -> Any:
        return (
            next(batches.generator)
            if self._uses_real_batch(returned)
            else self._replayed_batch(returned, batches.args, batches.generator)
        )

    def _uses_real_batch(self, one: ReturnedBatch) -> bool:
        trains = torch.is_grad_enabled() == one.grad_enabled
        if trains:
            self._on_batch_request()
        return self._variant.current.input == "real" or not trains

    def _replayed_batch(
        self, one: ReturnedBatch, args: Iterable[Any], batches: Iterator[Any]
    ) -> Any:
        names = (value for value in args if isinstance(value, str))
        key = (one.code, self._variant.current.input, *names)
        if key not in self._replays:
            found = self._new_replay()
            found.collect(batches, None)
            if not len(found):
                return next(batches)
            self._replays[key] = found
        return self._replays[key].next()


def _is_generator(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_GENERATOR)


def _on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _replace_code(function: FunctionType, replacement: Callable[..., Any]) -> None:
    code, name = function.__code__, _replacement_name(function)
    usual = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    usual.__kwdefaults__ = function.__kwdefaults__
    function.__globals__[name] = functools.partial(replacement, usual)
    function.__code__ = _forwarding_code(name, code.co_freevars)


def _replacement_name(function: FunctionType) -> str:
    return f"_nfold_made_{id(function)}"


def _forwarding_code(name: str, free: tuple[str, ...]) -> CodeType:
    unused = "; ".join(free) or "pass"
    source = (
        f"def outer({', '.join(free)}):\n"
        f"    def inner(*_nfold_args, **_nfold_named):\n"
        f"        return {name}(*_nfold_args, **_nfold_named)\n"
        f"        {unused}\n"
    )
    return _first_function_code(_first_function_code(compile(source, "<nfold>", "exec")))


def _first_function_code(code: CodeType) -> CodeType:
    return next(one for one in code.co_consts if isinstance(one, CodeType))
