"""PyTorch's exceptions as nfold's, at the seam and nowhere else."""

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
    """Raise OutOfMemory or Collateral for what PyTorch raises in their stead; pass the rest."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        told = translate_error(error, peak_memory_bytes)
        if told is None:
            raise
        raise told from error


def translate_error(
    error: BaseException, peak_memory_bytes: Callable[[], int]
) -> RunFailure | None:
    """The error of nfold's that an exception stands for, or None where it is only itself."""
    if isinstance(error, MemoryError):
        return OutOfMemory("the host is out of memory")
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(
        sign in text for sign in OUT_OF_MEMORY_MESSAGES
    ):
        held = peak_memory_bytes()
        message = f"out of memory with {held / 2**30:.2f} GiB held: {_first_line(text)}"
        return OutOfMemory(message, peak_memory_bytes=held)
    lost = isinstance(error, dist.DistNetworkError | dist.DistBackendError)
    if lost or any(sign in text.lower() for sign in LOST_PEER_MESSAGES):
        return Collateral(f"another rank is gone: {_first_line(text)}")
    return None


def translate_chained_error(
    error: BaseException, peak_memory_bytes: Callable[[], int]
) -> RunFailure | None:
    """What the error, or one that it was raised from, means to nfold, or None.

    A script may wrap what PyTorch raised; a lost rank stays a lost rank.
    """
    found = (translate_error(one, peak_memory_bytes) for one in _error_chain(error))
    return next((one for one in found if one is not None), None)


def _error_chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in found:
        found.append(following)
        following = following.__cause__ or following.__context__
    return found


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:200]
