"""Translates PyTorch's exceptions into nfold's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nfold.core.errors import Collateral, OutOfMemory, RunFailure

OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
LOST_PEER_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "remote process exited",
    "socket closed",
)


@contextmanager
def translate_errors(peak_memory_bytes: Callable[[], int]) -> Iterator[None]:
    """Raise OutOfMemory or Collateral instead of PyTorch's exceptions for them."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        translated = translate_error(error, peak_memory_bytes)
        if translated is None:
            raise
        raise translated from error


def translate_error(
    error: BaseException, peak_memory_bytes: Callable[[], int]
) -> RunFailure | None:
    """Return nfold's error for an exception, or None."""
    if isinstance(error, MemoryError):
        return OutOfMemory("the host is out of memory")
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    first_line = text.strip().split("\n")[0][:200]
    if isinstance(error, torch.OutOfMemoryError) or any(
        sign in text for sign in OUT_OF_MEMORY_MESSAGES
    ):
        peak = peak_memory_bytes()
        message = f"out of memory at a peak of {peak / 2**30:.2f} GiB: {first_line}"
        return OutOfMemory(message, peak_memory_bytes=peak)
    lost = isinstance(error, dist.DistNetworkError | dist.DistBackendError)
    if lost or any(sign in text.lower() for sign in LOST_PEER_MESSAGES):
        return Collateral(f"another rank has ended: {first_line}")
    return None


def translate_chained_error(
    error: BaseException, peak_memory_bytes: Callable[[], int]
) -> RunFailure | None:
    """Return nfold's error for an exception or one of its causes, or None.

    A script may raise an exception of its own from PyTorch's.
    """
    visited: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in visited:
        if translated := translate_error(current, peak_memory_bytes):
            return translated
        visited.append(current)
        current = current.__cause__ or current.__context__
    return None
