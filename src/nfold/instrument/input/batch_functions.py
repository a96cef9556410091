"""Functions of the script that make batches without a DataLoader."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from nfold.core.script_profile import BatchFunction
from nfold.core.source_location import display_filename, is_user_code
from nfold.engines.interleaver import ActiveVariant
from nfold.instrument.hooks.patches import function_key, installed_decorator
from nfold.instrument.input.batch_tensors import BatchReplay, iter_tensors, on_device, origins

# Steps in which every return is observed. This takes time: the steps are not timed.
OBSERVED_STEPS = 3
MAX_RETURNS = 256
# Parts of the function that they are in; the first three are functions until Python 3.12.
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
ASYNC_FLAGS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True)
class ReturnedBatch:
    """Tensors that a user function returned, held weakly; ``source`` returned its input."""

    code: CodeType
    source: ReturnedBatch | None
    tensors: tuple[weakref.ref[Tensor], ...]
    inputs_on_device: bool
    on_device: bool
    grad_enabled: bool


class BatchFunctionHooks:
    """Finds the batch functions in the warm-up, then replays the batches of decorated ones.

    A profile function observes the returns of user functions. The batch functions are the last one
    whose result a model was called with, and those that made its input on the host. The result of a
    function whose input requires gradients is a model state, not a batch.
    """

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
        self._replays: dict[object, BatchReplay] = {}
        self._observing = False

    def start(self) -> None:
        """Observe returns, unless the script has set a profile function itself."""
        if sys.getprofile() is None:
            self._observing = True
            sys.setprofile(self._on_profile_event)

    def on_step(self) -> None:
        if self._observing:
            self._steps += 1
            if self._steps == OBSERVED_STEPS:
                self.stop()

    def stop(self) -> None:
        if not self._observing:
            return
        sys.setprofile(None)
        self._observing = False
        self._returned.clear()
        self._inputs.clear()
        chains = [
            chain
            for codes, chain in self._candidates.items()
            if not self._state_functions & {*codes}
        ]
        # Several chains each make a part of the batch: none of them makes the whole.
        if len(chains) == 1 and all(map(self._is_replaceable, chains[0])):
            self._chain = chains[0]

    def _is_replaceable(self, returned: ReturnedBatch) -> bool:
        if self._variant.is_baseline("input"):
            is_named = returned.code.co_name.isidentifier()  # a lambda cannot be decorated
            return is_named and not returned.code.co_flags & ASYNC_FLAGS
        decorator = installed_decorator()
        return decorator is not None and returned.code in decorator.decorated

    def _on_profile_event(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not is_user_code(code.co_filename):
            return
        if code.co_name in COMPREHENSIONS:
            return
        if event == "call":
            values = list(frame.f_locals.values())
            # A function that gets a module, or is a method of one, is part of the model.
            if not any(isinstance(local, nn.Module) for local in values):
                # The locals of a resumed generator hold its last batch, not the input of the next.
                self._inputs[id(frame)] = [] if _is_generator(code) else [*iter_tensors(values)]
            return
        inputs, tensors = self._inputs.pop(id(frame), None), list(iter_tensors(value))
        if any(tensor.requires_grad for tensor in inputs or ()):
            self._state_functions.add(code)
            self._state.extend(map(weakref.ref, tensors))
            return
        if inputs is not None and tensors and not any(x.requires_grad for x in tensors):
            self._calls[code] += 1
            self._returned.append(
                ReturnedBatch(
                    code=code,
                    source=self._latest_return(inputs),
                    tensors=tuple(map(weakref.ref, tensors)),
                    inputs_on_device=any(map(on_device, inputs)),
                    on_device=all(map(on_device, tensors)),
                    grad_enabled=torch.is_grad_enabled(),
                )
            )

    def on_model_input(self, inputs: Any) -> None:
        """Find the functions that made the input of a model that trains, except its own state."""
        if not self._observing:
            return
        state = {id(ref()) for ref in self._state}
        batch = (tensor for tensor in iter_tensors(inputs) if id(tensor) not in state)
        returned, chain = self._latest_return(batch), list[ReturnedBatch]()
        while returned is not None:
            # A function with inputs on a device is work of the device, not input of the host.
            chain = chain if returned.inputs_on_device else [returned, *chain]
            returned = returned.source
        if chain:
            self._candidates[tuple(link.code for link in chain)] = tuple(chain)

    def _latest_return(self, tensors: Iterable[Tensor]) -> ReturnedBatch | None:
        ids = {id(origin) for tensor in tensors for origin in origins(tensor)}
        for returned in reversed(self._returned) if ids else ():
            if any(id(ref()) in ids for ref in returned.tensors):
                return returned
        return None

    @property
    def batch_function(self) -> BatchFunction | None:
        if not self._chain:
            return None
        codes = [link.code for link in self._chain]
        first = codes[0]
        return BatchFunction(
            names=tuple(code.co_name for code in codes),
            defined_at=f"{display_filename(first.co_filename)}:{first.co_firstlineno}",
            on_device=self._chain[-1].on_device,
            function_keys=tuple(
                function_key(code.co_filename, code.co_firstlineno, code.co_name) for code in codes
            ),
        )

    @property
    def batches_per_step(self) -> int:
        calls = self._calls[self._chain[0].code] if self._chain else 0
        return round(calls / max(1, self._steps))

    @property
    def replays(self) -> tuple[BatchReplay, ...]:
        return tuple(self._replays.values())

    def install_replacements(self) -> None:
        """Replace the batches of the batch functions if any variant replays them."""
        decorator = installed_decorator()
        if decorator is not None and not self._variant.is_baseline("input"):
            for link in self._chain:
                decorator.replacements[link.code] = functools.partial(self._next_batch, link)

    def _next_batch(
        self, returned: ReturnedBatch, args: tuple[Any, ...], batches: Iterator[Any]
    ) -> Any:
        if self._uses_real_batch(returned):
            return next(batches)
        return self._replayed_batch(returned, args, batches)

    def _uses_real_batch(self, returned: ReturnedBatch) -> bool:
        trains = torch.is_grad_enabled() == returned.grad_enabled
        if trains:
            self._on_batch_request()
        return self._variant.current.input == "real" or not trains

    def _replayed_batch(
        self, returned: ReturnedBatch, args: Iterable[Any], batches: Iterator[Any]
    ) -> Any:
        # get_batch("train") and get_batch("val") have separate replays.
        names = (value for value in args if isinstance(value, str))
        key = (returned.code, self._variant.current.input, *names)
        if key not in self._replays:
            replay = self._new_replay()
            replay.collect(batches)
            if not len(replay):
                return next(batches)
            self._replays[key] = replay
        return self._replays[key].next()


def _is_generator(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_GENERATOR)
