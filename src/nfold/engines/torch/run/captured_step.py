"""``run.step``: a user's function that makes one step, replayed as a CUDA graph.

The first calls run eagerly. A replay runs its kernels without its Python: only the return value
leaves it. If it cannot be captured, it runs eagerly, and one warning names the line.
"""

from __future__ import annotations

import atexit
import os
import traceback
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

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
        self._recorder = recorder
        self._lacks_memory = False
        self._captured: CapturedFunction | None = CapturedFunction(
            self._call,
            recorder,
            recording=bookkeeping.recording,
            before_graph=bookkeeping.confirm_step,
            on_eager=self._report_eager,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._captured is None:
            return self._function(*args, **kwargs)
        self._bookkeeping.make_capturable()
        tensors, tree = flatten_tensors(to_device((args, kwargs), self._bookkeeping.device))
        try:
            return self._captured(tensors, tree, self._bookkeeping.captured_state())
        except CaptureFailed as failed:
            self._on_failure(self._captured, failed)
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

    def _on_failure(self, captured: CapturedFunction, failed: CaptureFailed) -> None:
        self._bookkeeping.abandon_recording()
        if failed.is_out_of_memory and captured.graphs:
            captured.max_graphs, self._lacks_memory = captured.graphs, True
        else:
            self._give_up(failed)
        if failed.__cause__ is not None:  # its frames hold the tensors of the recording
            traceback.clear_frames(failed.__cause__.__traceback__)

    def _report_eager(self) -> None:
        captured = self._captured
        assert captured is not None
        if dist.is_initialized() and dist.get_rank() != 0 and not self._lacks_memory:
            return
        name, _ = _describe(self._function)
        gib = self._recorder.pool_bytes() / 2**30
        reason = " for lack of memory" if self._lacks_memory else ""
        warnings.warn(
            f"step {name}: {captured.graphs} CUDA graphs hold {gib:.2g} GiB; "
            f"{captured.forms - captured.graphs} other sets of shapes, numbers and objects so far "
            f"run eagerly{reason}; next: run.loader(..., pad_to=64) if lengths vary; a number that "
            "changes in each step as a tensor",
            stacklevel=5,  # the line that called the step
        )

    def _give_up(self, failed: CaptureFailed) -> None:
        self.close()
        self._captured = None
        name, line = _describe(self._function)
        cause = failed.__cause__
        for frame in traceback.extract_tb(cause.__traceback__ if cause else None):
            if is_user_code(frame.filename):
                line = f"{frame.filename}:{frame.lineno} ({frame.line})"
        warnings.warn(
            f"step {name} runs eagerly: {line} cannot be captured ({failed.reason})",
            stacklevel=4,
        )


def captured_step(function: Callable[P, R], bookkeeping: RunBookkeeping) -> Callable[P, R]:
    """Return the function as a captured step; its graphs are reset when the script ends.

    Ranks whose batches have different lengths record a step at different times. NCCL must then not
    register the buffers of captured collectives: with NVLink SHARP all ranks of a node take part in
    a registration (NCCL 2.27 to 2.30, ``nvls.cc``), and a rank that runs eagerly does not.
    """
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # read at the first captured collective
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
