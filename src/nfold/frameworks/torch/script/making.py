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

from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.torch.script.batches import tensors_of
from nfold.frameworks.torch.script.moves import origins
from nfold.frameworks.torch.script.replay import Replay
from nfold.frameworks.torch.script.suspended import Batches, here, noted
from nfold.place import is_the_users, shown
from nfold.seen import Maker

LOOK_STEPS = 3
"""In which every return of a function is looked at: that takes time, and no step of it is timed."""
REMEMBERED = 256
PART_OF_ANOTHER = ("<listcomp>", "<setcomp>", "<dictcomp>")
"""Comprehensions, functions until Python 3.12: nobody else calls them."""
EXPRESSION = "<genexpr>"
NO_FUNCTION = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True)
class Returned:
    """What a function of the user's returned, without keeping it; ``before`` returned what this one
    was given.
    """

    code: CodeType
    before: Returned | None
    tensors: tuple[weakref.ref[Tensor], ...]
    given_on_device: bool
    on_device: bool
    with_gradients: bool


class Making:
    """Finds the functions (``begin`` to ``stop``), and stands in their place (``replace``)."""

    def __init__(
        self, left_out: LeftOut, replay: Callable[[], Replay], asked: Callable[[], None]
    ) -> None:
        """``asked`` is called where the training asks for a batch, from ``replace`` on."""
        self._left_out = left_out
        self._replay = replay
        self._asked = asked
        self._returned: deque[Returned] = deque(maxlen=REMEMBERED)
        self._given: dict[int, list[Tensor]] = {}
        self._calls: Counter[CodeType] = Counter()
        self._fed: dict[tuple[CodeType, ...], tuple[Returned, ...]] = {}
        self._hands_on = set[CodeType]()
        self._state: deque[weakref.ref[Tensor]] = deque(maxlen=REMEMBERED)
        self._steps = 0
        self._found: tuple[Returned, ...] = ()
        self._replaced: list[tuple[FunctionType, CodeType]] = []
        self._replays: dict[object, Replay] = {}
        self._looking = False

    def begin(self) -> None:
        """Look at what functions return; unless somebody else looks at them already."""
        if sys.getprofile() is None:
            self._looking = True
            sys.setprofile(self._on_event)

    def stepped(self) -> None:
        """A step was made."""
        if self._looking:
            self._steps += 1
            if self._steps == LOOK_STEPS:
                self.stop()

    def stop(self) -> None:
        """Look no more."""
        if not self._looking:
            return
        sys.setprofile(None)
        self._looking = False
        self._returned.clear()
        self._given.clear()
        fed = [made for codes, made in self._fed.items() if not self._hands_on & {*codes}]
        # Of several functions that each make a part none is the batch's.
        if len(fed) == 1:
            (found,) = fed
            if all(map(self._replaceable, found)):
                self._found = found

    def _replaceable(self, one: Returned) -> bool:
        """Whether other batches can be given in its place, where they are at any time."""
        if not _suspends(one.code):
            return not one.code.co_flags & NO_FUNCTION
        generators = here()
        defined = generators is not None and one.code in generators.defined
        return defined or self._left_out.never("input")

    def _on_event(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not is_the_users(code.co_filename):
            return
        if code.co_name in PART_OF_ANOTHER:
            return
        if event == "call":
            values = list(frame.f_locals.values())
            # What gets a module, or is a method of one, computes with it.
            if not any(isinstance(one, nn.Module) for one in values):
                # What goes on has its last batch at hand, of which the next is not made.
                at_hand = [] if _suspends(code) else list(tensors_of(values))
                self._given[id(frame)] = at_hand
            return
        given, tensors = self._given.pop(id(frame), None), list(tensors_of(value))
        if any(one.requires_grad for one in given or ()):
            self._hands_on.add(code)
            self._state.extend(map(weakref.ref, tensors))
            return
        if code.co_name == EXPRESSION and self._last(tensors) is not None:
            # It hands on what another function made: (one.to(device) for one in get_batch()).
            return
        if given is not None and tensors and not any(one.requires_grad for one in tensors):
            self._calls[code] += 1
            self._returned.append(
                Returned(
                    code=code,
                    before=self._last(given),
                    tensors=tuple(map(weakref.ref, tensors)),
                    given_on_device=any(map(_on_device, given)),
                    on_device=all(map(_on_device, tensors)),
                    with_gradients=torch.is_grad_enabled(),
                )
            )

    def fed(self, given: Any) -> None:
        """A model that trains is called with this: with a batch, and what it hands on to itself."""
        if not self._looking:
            return
        state = {id(ref()) for ref in self._state}
        batch = (one for one in tensors_of(given) if id(one) not in state)
        one, made = self._last(batch), list[Returned]()
        while one is not None:
            # What changes batches on a device is its work, not the host's.
            made = made if one.given_on_device else [one, *made]
            one = one.before
        if made:
            self._fed[tuple(one.code for one in made)] = tuple(made)

    def _last(self, tensors: Iterable[Tensor]) -> Returned | None:
        """What was returned last of these, or of those that they were made of."""
        wanted = {id(one) for tensor in tensors for one in origins(tensor)}
        for one in reversed(self._returned) if wanted else ():
            if any(id(ref()) in wanted for ref in one.tensors):
                return one
        return None

    @property
    def found(self) -> Maker | None:
        """The functions, as they are told to a person."""
        if not self._found:
            return None
        code = self._found[0].code
        return Maker(
            names=tuple(one.code.co_name for one in self._found),
            place=f"{shown(code.co_filename)}:{code.co_firstlineno}",
            on_device=self._found[-1].on_device,
            generators=tuple(noted(one.code) for one in self._found if _suspends(one.code)),
        )

    @property
    def per_step(self) -> int:
        """Batches of a step, 0 where no function makes them."""
        calls = self._calls[self._found[0].code] if self._found else 0
        return round(calls / max(1, self._steps))

    @property
    def replays(self) -> tuple[Replay, ...]:
        """What gives first batches again."""
        return tuple(self._replays.values())

    def replace(self) -> None:
        """Stand in the functions' place, if their batches are left out at any time."""
        if self._left_out.never("input"):
            return
        generators = here()
        for one in self._found:
            if _suspends(one.code):
                assert generators is not None
                generators.give[one.code] = functools.partial(self._yielded, one)
                continue
            for function in gc.get_referrers(one.code):
                if isinstance(function, FunctionType) and function.__code__ is one.code:
                    self._replaced.append((function, one.code))
                    _give_way(function, functools.partial(self._made, one))

    def restore(self) -> None:
        """Let the script have its function back."""
        while self._replaced:
            function, code = self._replaced.pop()
            function.__code__ = code
            del function.__globals__[_name(function)]

    def _made(self, one: Returned, usual: FunctionType, *args: Any, **kwargs: Any) -> Any:
        """A batch: the real one, or a first one again. What evaluates gets real ones."""
        if self._real(one):
            return usual(*args, **kwargs)
        return self._again(one, args, (usual(*args, **kwargs) for _ in itertools.count()))

    def _yielded(self, one: Returned, asked: Batches) -> Any:
        """The same of a generator, which does not end where first batches are given again."""
        return next(asked.real) if self._real(one) else self._again(one, asked.args, asked.real)

    def _real(self, one: Returned) -> bool:
        trains = torch.is_grad_enabled() == one.with_gradients
        if trains:
            self._asked()
        return self._left_out.now.input == "real" or not trains

    def _again(self, one: Returned, args: Iterable[Any], batches: Iterator[Any]) -> Any:
        """A first batch; of ``batches`` as many are kept as there are, up to some."""
        names = (value for value in args if isinstance(value, str))
        key = (one.code, self._left_out.now.input, *names)
        if key not in self._replays:
            found = self._replay()
            found.collect(batches, None)
            if not len(found):
                return next(batches)
            self._replays[key] = found
        return self._replays[key].next()


def _suspends(code: CodeType) -> bool:
    """Whether it is a generator's."""
    return bool(code.co_flags & inspect.CO_GENERATOR)


def _on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


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
        f"    def inner(*_nfold_args, **_nfold_named):\n"
        f"        return {name}(*_nfold_args, **_nfold_named)\n"
        f"        {unused}\n"
    )
    return _inside(_inside(compile(source, "<nfold>", "exec")))


def _inside(code: CodeType) -> CodeType:
    """The first function that is defined in it."""
    return next(one for one in code.co_consts if isinstance(one, CodeType))
