"""``run.step``: the user's function that makes one step, replayed as a CUDA graph.

Its first calls run as they are. From then on its kernels are replayed without its Python, so
what it does besides computing is not repeated: what it returns is all that comes out. Where it
cannot be captured it runs eagerly, and one warning names the line.
"""

from __future__ import annotations

import atexit
import traceback
import warnings
from collections.abc import Callable, Hashable
from functools import partial, wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from nfold.errors import UsageError
from nfold.frameworks.torch.capture import Captured, CudaRecorder, Graph, NotCaptured, Recorder
from nfold.frameworks.torch.nested import Form, taken_apart
from nfold.frameworks.torch.user.moving import moved

P = ParamSpec("P")
R = TypeVar("R")
INSIDE = ("/torch/", "/nfold/frameworks/", "/nfold/api.py")
"""Parts of the paths of files whose lines are not the user's."""


class Bookkeeping(Protocol):
    """What a run keeps in Python about its steps, which a replay leaves out."""

    @property
    def device(self) -> torch.device:
        """Where tensors must be before a recording reads them."""

    def frozen(self) -> Hashable:
        """Everything besides tensors that a step depends on now."""

    def rates(self) -> list[int]:
        """How often each learning rate that is a tensor was changed in place."""

    def recording(self) -> None:
        """A call is recorded from here on: note what Python does in it."""

    def gave_up(self) -> None:
        """A recording ended with an error."""

    def recorded(self) -> Callable[[], None]:
        """The recording is over; returns what repeats what was noted, after a replay."""


class CapturedStep:
    """The user's function. Called like it; every set of shapes and settings has its own graph."""

    def __init__(
        self, function: Callable[..., Any], books: Bookkeeping, recorder: Recorder
    ) -> None:
        self._function = function
        self._books = books
        self._captured: Captured | None = Captured(self._call, _Noting(recorder, books))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        if self._captured is None:
            return self._function(*args, **kwargs)
        tensors, form = taken_apart(moved((args, kwargs), self._books.device))
        try:
            return self._captured(tensors, form, self._books.frozen())
        except NotCaptured as failed:
            self._give_up(failed.__cause__)
            return self._function(*args, **kwargs)

    def close(self) -> None:
        """Reset the graphs."""
        if self._captured is not None:
            self._captured.close()

    def _call(self, *given: Any) -> Any:
        *tensors, form, _ = given
        assert isinstance(form, Form)
        args, kwargs = form.filled(iter(tensors))
        return self._function(*args, **kwargs)

    def _give_up(self, cause: BaseException | None) -> None:
        self.close()
        self._books.gave_up()
        self._captured = None
        name, line = _named(self._function)
        where = _users_line(cause) or line
        reason = str(cause).strip().split("\n")[0] if cause else "it cannot be captured"
        warnings.warn(
            f"step {name} runs eagerly: {where} cannot be captured ({reason})",
            stacklevel=3,
        )


def captured(function: Callable[P, R], books: Bookkeeping) -> Callable[P, R]:
    """The function as a captured step; its graphs are reset when the script ends."""
    made = CapturedStep(function, books, CudaRecorder(books.device))
    atexit.register(made.close)
    return wraps(function)(made)


def say_needs_gpu(function: Callable[..., Any]) -> None:
    """Warn that a function was to be captured where there is no GPU."""
    name, line = _named(function)
    warnings.warn(
        f"step 'captured' needs a GPU: {name} ({line}) runs as it is",
        stacklevel=3,
    )


def _named(function: Callable[..., Any]) -> tuple[str, str]:
    """The name of the user's function and where it begins, also of a partial or an object."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return name, f"{code.co_filename}:{code.co_firstlineno}" if code else "built in"


class _Noting:
    """A recorder whose graphs repeat, after every replay, what Python noted while recording."""

    def __init__(self, recorder: Recorder, books: Bookkeeping) -> None:
        self.aside = recorder.aside
        self._recorder = recorder
        self._books = books

    def record(self, call: Callable[[], Any]) -> tuple[Graph, Any]:
        self._books.recording()
        try:
            graph, result = self._recorder.record(lambda: self._checked(call))
        finally:
            repeat = self._books.recorded()
        return _Noted(graph, repeat), result

    def _checked(self, call: Callable[[], Any]) -> Any:
        before = self._books.rates()
        result = call()
        if self._books.rates() != before:
            raise UsageError(
                "it changes a learning rate; next: run.prepare(schedule), or step it outside"
            )
        return result


class _Noted:
    """A graph, and what Python does after each of its replays."""

    def __init__(self, graph: Graph, repeat: Callable[[], None]) -> None:
        self.reset = graph.reset
        self._graph = graph
        self._repeat = repeat

    def replay(self) -> None:
        self._graph.replay()
        self._repeat()


def _users_line(error: BaseException | None) -> str | None:
    """``file:line`` of the innermost frame that is the user's."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    own = [f for f in frames if not any(part in f.filename for part in INSIDE)]
    return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else None
