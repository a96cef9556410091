"""Fixtures of tests of instrumented scripts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Join a process group of one rank.

    Its objects are collected here: in a forked loader worker, collecting them would end the
    process, because the threads of a process group do not exist there.
    """
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
