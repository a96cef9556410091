"""What tests of PyTorch share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone.

    What it leaves is collected here: collected in a loader's worker it ends that, because a
    process group's threads are not in a forked process.
    """
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
