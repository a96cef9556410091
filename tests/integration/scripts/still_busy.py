"""End a rank while a thread of gloo still runs Python code."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import nfold

BUSY_S = 0.3
BEGUN = threading.Event()


def compute(done: Any) -> Any:
    BEGUN.set()
    until = time.monotonic() + BUSY_S
    while time.monotonic() < until:
        pass
    return done.value()


if __name__ == "__main__":
    nfold.Run()
    work: Any = dist.all_reduce(torch.zeros(30), async_op=True)
    after = work.get_future().then(compute)
    BEGUN.wait()
