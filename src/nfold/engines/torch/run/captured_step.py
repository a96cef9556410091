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

from nfold.core.errors import UsageError
from nfold.core.source_location import is_user_code
from nfold.engines.torch.input.dataloader import to_device
from nfold.engines.torch.nested_tensors import TensorTree, flatten_tensors
from nfold.engines.torch.step.cuda_graph import (
    CapturedFunction,
    CaptureFailed,
    CudaGraphRecorder,
    GraphRecorder,
    RecordedGraph,
)

P = ParamSpec("P")
R = TypeVar("R")


class StepBookkeeping(Protocol):
    """What a run keeps in Python about its steps, which a replay leaves out."""

    @property
    def device(self) -> torch.device:
        """Where tensors must be before a recording reads them."""

    def captured_state(self) -> Hashable:
        """Everything besides tensors that a step depends on now."""

    def lr_versions(self) -> list[int]:
        """How often each learning rate that is a tensor was changed in place."""

    def begin_recording(self) -> None:
        """A call is recorded from here on: note what Python does in it."""

    def abandon_recording(self) -> None:
        """A recording ended with an error."""

    def end_recording(self) -> Callable[[], None]:
        """The recording is over; returns what repeats what was noted, after a replay."""


class CapturedStep:
    """The user's function. Called like it; every set of shapes and settings has its own graph."""

    def __init__(
        self, function: Callable[..., Any], bookkeeping: StepBookkeeping, recorder: GraphRecorder
    ) -> None:
        self._function = function
        self._bookkeeping = bookkeeping
        self._captured: CapturedFunction | None = CapturedFunction(
            self._call, _BookkeepingRecorder(recorder, bookkeeping)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._captured is None:
            return self._function(*args, **kwargs)
        tensors, form = flatten_tensors(to_device((args, kwargs), self._bookkeeping.device))
        try:
            return self._captured(tensors, form, self._bookkeeping.captured_state())
        except CaptureFailed as failed:
            self._give_up(failed.__cause__)
            return self._function(*args, **kwargs)

    def close(self) -> None:
        """Reset the graphs."""
        if self._captured is not None:
            self._captured.close()

    def _call(self, *given: Any) -> Any:
        *tensors, form, _ = given
        assert isinstance(form, TensorTree)
        args, kwargs = form.fill(iter(tensors))
        return self._function(*args, **kwargs)

    def _give_up(self, cause: BaseException | None) -> None:
        self.close()
        self._bookkeeping.abandon_recording()
        self._captured = None
        name, line = _describe(self._function)
        where = _user_line(cause) or line
        reason = str(cause).strip().split("\n")[0] if cause else "it cannot be captured"
        warnings.warn(
            f"step {name} runs eagerly: {where} cannot be captured ({reason})",
            stacklevel=3,
        )


def captured_step(function: Callable[P, R], bookkeeping: StepBookkeeping) -> Callable[P, R]:
    """The function as a captured step; its graphs are reset when the script ends."""
    made = CapturedStep(function, bookkeeping, CudaGraphRecorder(bookkeeping.device))
    atexit.register(made.close)
    return wraps(function)(made)


def warn_needs_gpu(function: Callable[..., Any]) -> None:
    """Warn that a function was to be captured where there is no GPU."""
    name, line = _describe(function)
    warnings.warn(
        f"step 'captured' needs a GPU: {name} ({line}) runs as it is",
        stacklevel=3,
    )


def _describe(function: Callable[..., Any]) -> tuple[str, str]:
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return name, f"{code.co_filename}:{code.co_firstlineno}" if code else "built in"


class _BookkeepingRecorder:
    """A recorder whose graphs repeat, after every replay, what Python noted while recording."""

    def __init__(self, recorder: GraphRecorder, bookkeeping: StepBookkeeping) -> None:
        self.run_on_capture_stream = recorder.run_on_capture_stream
        self._recorder = recorder
        self._bookkeeping = bookkeeping

    def record(self, call: Callable[[], Any]) -> tuple[RecordedGraph, Any]:
        self._bookkeeping.begin_recording()
        try:
            graph, result = self._recorder.record(lambda: self._checked(call))
        finally:
            repeat = self._bookkeeping.end_recording()
        return _BookkeepingGraph(graph, repeat), result

    def _checked(self, call: Callable[[], Any]) -> Any:
        before = self._bookkeeping.lr_versions()
        result = call()
        if self._bookkeeping.lr_versions() != before:
            raise UsageError(
                "it changes a learning rate; next: run.prepare(schedule), or step it outside"
            )
        return result


class _BookkeepingGraph:
    """A graph, and what Python does after each of its replays."""

    def __init__(self, graph: RecordedGraph, repeat: Callable[[], None]) -> None:
        self.reset = graph.reset
        self._graph = graph
        self._repeat = repeat

    def replay(self) -> None:
        self._graph.replay()
        self._repeat()


def _user_line(error: BaseException | None) -> str | None:
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    own = [frame for frame in frames if is_user_code(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else None
