"""PyTorch's exceptions as nfold's, at the seam and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nfold.errors import Collateral, OutOfMemory

MEMORY = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "remote process exited",
    "socket closed",
)


@contextmanager
def translated(peak_memory_bytes: Callable[[], int]) -> Iterator[None]:
    """Raise OutOfMemory or Collateral for what PyTorch raises in their stead; pass the rest."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory("the host is out of memory") from error
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in MEMORY):
            held = peak_memory_bytes()
            message = f"out of memory with {held / 2**30:.2f} GiB held: {_first_line(text)}"
            raise OutOfMemory(message, peak_memory_bytes=held) from error
        lost = isinstance(error, dist.DistNetworkError | dist.DistBackendError)
        if lost or any(sign in text.lower() for sign in PEER):
            raise Collateral(f"another rank is gone: {_first_line(text)}") from error
        raise


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:200]
