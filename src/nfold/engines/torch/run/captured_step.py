"""``run.step``: a user's function that makes one step, replayed as a CUDA graph.

The first calls run eagerly. A replay runs its kernels without its Python: only the return value
leaves it. If it cannot be captured, it runs eagerly, and one warning names the line.
"""

from __future__ import annotations

import atexit
import traceback
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from nfold.core.errors import UsageError
from nfold.core.source_location import is_user_code
from nfold.engines.torch.input.dataloader import to_device
from nfold.engines.torch.nested_tensors import TensorTree, flatten_tensors
from nfold.engines.torch.run.state import RunBookkeeping
from nfold.engines.torch.step.cuda_graph import (
    CapturedFunction,
    CaptureFailed,
    CudaGraphRecorder,
    GraphRecorder,
)

P = ParamSpec("P")
R = TypeVar("R")


class CapturedStep:
    """The user's function. Every set of shapes and settings has its own graph."""

    def __init__(
        self, function: Callable[..., Any], bookkeeping: RunBookkeeping, recorder: GraphRecorder
    ) -> None:
        self._function = function
        self._bookkeeping = bookkeeping
        self._captured: CapturedFunction | None = CapturedFunction(
            self._call,
            recorder,
            recording=bookkeeping.recording,
            before_graph=bookkeeping.confirm_step,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._captured is None:
            return self._function(*args, **kwargs)
        tensors, tree = flatten_tensors(to_device((args, kwargs), self._bookkeeping.device))
        try:
            return self._captured(tensors, tree, self._bookkeeping.captured_state())
        except CaptureFailed as failed:
            self._give_up(failed)
            return self._function(*args, **kwargs)

    def close(self) -> None:
        if self._captured is not None:
            self._captured.close()

    def _call(self, *arguments: Any) -> Any:
        *tensors, tree, _ = arguments
        assert isinstance(tree, TensorTree)
        args, kwargs = tree.fill(iter(tensors))
        before = self._bookkeeping.lr_versions()
        result = self._function(*args, **kwargs)
        if self._bookkeeping.is_recording and self._bookkeeping.lr_versions() != before:
            raise UsageError(
                "it changes a learning rate; next: run.prepare(schedule), or step it outside"
            )
        return result

    def _give_up(self, failed: CaptureFailed) -> None:
        self.close()
        self._bookkeeping.abandon_recording()
        self._captured = None
        name, line = _describe(self._function)
        cause = failed.__cause__
        for frame in traceback.extract_tb(cause.__traceback__ if cause else None):
            if is_user_code(frame.filename):
                line = f"{frame.filename}:{frame.lineno} ({frame.line})"
        warnings.warn(
            f"step {name} runs eagerly: {line} cannot be captured ({failed.reason})",
            stacklevel=3,
        )


def captured_step(function: Callable[P, R], bookkeeping: RunBookkeeping) -> Callable[P, R]:
    """Return the function as a captured step; its graphs are reset when the script ends."""
    step = CapturedStep(function, bookkeeping, CudaGraphRecorder(bookkeeping.device))
    atexit.register(step.close)
    return wraps(function)(step)


def warn_needs_gpu(function: Callable[..., Any]) -> None:
    name, line = _describe(function)
    warnings.warn(
        f"step 'captured' needs a GPU: {name} ({line}) runs eagerly",
        stacklevel=3,
    )


def _describe(function: Callable[..., Any]) -> tuple[str, str]:
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return name, f"{code.co_filename}:{code.co_firstlineno}" if code else "built in"
