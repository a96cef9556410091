"""A function of the script's own that makes its batches, where no DataLoader does.

It is found in the warm-up: the last function that returned what a model was then called with. From
then on its code is another one, which gives first batches again where a step's input is left out.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor

from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.torch.script.batches import tensors_of
from nfold.frameworks.torch.script.replay import Replay
from nfold.place import is_the_users, shown
from nfold.seen import Maker

LOOK_STEPS = 3
"""In which every return of a function is looked at: that takes time, and no step of it is timed."""
REMEMBERED = 256
SOURCE = "_nfold_source"
"""An attribute of a tensor: the one that it was copied from."""
FAR = 8
"""From a tensor back to the one that a function returned: views and copies."""
NO_FUNCTION = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True)
class Returned:
    """What a function of the user's returned, without keeping it."""

    code: CodeType
    tensors: tuple[weakref.ref[Tensor], ...]
    on_device: bool
    with_gradients: bool


class Making:
    """Finds the function (``begin`` to ``settle``), and stands in its place (``replace``)."""

    def __init__(self, left_out: LeftOut, replay: Callable[[], Replay]) -> None:
        self._left_out = left_out
        self._replay = replay
        self._returned: deque[Returned] = deque(maxlen=REMEMBERED)
        self._calls: Counter[CodeType] = Counter()
        self._fed: Counter[CodeType] = Counter()
        self._steps = 0
        self._last: dict[CodeType, Returned] = {}
        self._found: Returned | None = None
        self._replaced: list[tuple[FunctionType, CodeType]] = []
        self._replays: dict[object, Replay] = {}
        self.looking = False

    def begin(self) -> None:
        """Look at what functions return; unless somebody else looks at them already."""
        if sys.getprofile() is None:
            self.looking = True
            sys.setprofile(self._on_event)

    def stepped(self) -> None:
        """A step was made."""
        if self.looking:
            self._steps += 1
            if self._steps == LOOK_STEPS:
                self.stop()

    def stop(self) -> None:
        """Look no more."""
        if not self.looking:
            return
        sys.setprofile(None)
        self.looking = False
        self._returned.clear()
        # Of several functions that each make a part none is the batch's.
        if len(self._fed) == 1:
            (code,) = self._fed
            if not code.co_flags & NO_FUNCTION:
                self._found = self._last[code]

    def _on_event(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event != "return" or value is None or not is_the_users(code.co_filename):
            return
        tensors = list(tensors_of(value))
        if tensors:
            self._calls[code] += 1
            on_device = all(tensor.device.type != "cpu" for tensor in tensors)
            references = tuple(map(weakref.ref, tensors))
            self._returned.append(
                Returned(code, references, on_device, torch.is_grad_enabled()),
            )

    def fed(self, given: Any) -> None:
        """A model that trains is called with this."""
        if not self.looking:
            return
        wanted = {id(one) for tensor in tensors_of(given) for one in _origins(tensor)}
        for one in reversed(self._returned):
            if any(id(found) in wanted for ref in one.tensors if (found := ref()) is not None):
                self._fed[one.code] += 1
                self._last[one.code] = one
                return

    @property
    def found(self) -> Maker | None:
        """The function, as it is told to a person."""
        if self._found is None:
            return None
        code = self._found.code
        place = f"{shown(code.co_filename)}:{code.co_firstlineno}"
        return Maker(name=code.co_name, place=place, on_device=self._found.on_device)

    @property
    def per_step(self) -> int:
        """Batches of a step, 0 where no function makes them."""
        return (
            0 if self._found is None else max(1, round(self._calls[self._found.code] / self._steps))
        )

    @property
    def replays(self) -> tuple[Replay, ...]:
        """What gives first batches again."""
        return tuple(self._replays.values())

    def replace(self) -> None:
        """Stand in the function's place, if its batches are left out at any time."""
        if self._found is None or self._left_out.never("input"):
            return
        code = self._found.code
        for function in gc.get_referrers(code):
            if isinstance(function, FunctionType) and function.__code__ is code:
                self._replaced.append((function, code))
                _give_way(function, self._made)

    def restore(self) -> None:
        """Let the script have its function back."""
        while self._replaced:
            function, code = self._replaced.pop()
            function.__code__ = code
            del function.__globals__[_name(function)]

    def _made(self, usual: FunctionType, *args: Any, **kwargs: Any) -> Any:
        """A batch: the real one, or a first one again. What evaluates gets real ones."""
        assert self._found is not None
        input_, trains = self._left_out.now.input, self._found.with_gradients
        if input_ == "real" or torch.is_grad_enabled() != trains:
            return usual(*args, **kwargs)
        of_which = (input_, *(value for value in args if isinstance(value, str)))
        if of_which not in self._replays:
            found = self._replay()
            found.collect((usual(*args, **kwargs) for _ in itertools.count()), None)
            self._replays[of_which] = found
        return self._replays[of_which].next()


def derive(source: Tensor, made: Tensor) -> None:
    """Note what a tensor was copied from, unless gradients go through: those are no batches."""
    if made is not source and not made.requires_grad:
        setattr(made, SOURCE, source)


def _origins(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, and those that it is a view or a copy of."""
    found: Any = tensor
    for _ in range(FAR):
        if found is None:
            return
        yield found
        found = getattr(found, SOURCE, None) if found._base is None else found._base


def _give_way(function: FunctionType, made: Callable[..., Any]) -> None:
    """Whoever calls the function calls ``made`` with it from now on, under whatever name."""
    code, name = function.__code__, _name(function)
    usual = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    usual.__kwdefaults__ = function.__kwdefaults__
    function.__globals__[name] = functools.partial(made, usual)
    function.__code__ = _calling(name, code.co_freevars)


def _name(function: FunctionType) -> str:
    """Of a global that no script has."""
    return f"_nfold_made_{id(function)}"


def _calling(name: str, free: tuple[str, ...]) -> CodeType:
    """Code that calls a global with all that it is given; of as many free variables."""
    unused = "; ".join(free) or "pass"
    source = (
        f"def outer({', '.join(free)}):\n"
        f"    def inner(*args, **kwargs):\n"
        f"        return {name}(*args, **kwargs)\n"
        f"        {unused}\n"
    )
    return _inside(_inside(compile(source, "<nfold>", "exec")))


def _inside(code: CodeType) -> CodeType:
    """The first function that is defined in it."""
    return next(one for one in code.co_consts if isinstance(one, CodeType))
