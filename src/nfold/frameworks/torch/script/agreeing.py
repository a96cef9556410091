"""Ranks that decide alike: rank 0 by what it knows, the others by its word.

They hear it through the store of the script's process group; without one each is by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from nfold.frameworks.torch.script.facts import has_process_group
from nfold.frameworks.torch.script.late import UNTYPED_DIST

DECISION_POLL_S = 0.01


def publish(key: str, value: bool) -> None:
    """Rank 0 tells the others what it ``found``."""
    if has_process_group() and dist.get_rank() == 0:
        _decision_store().set(key, str(value))


def agreed_value(key: str, own_value: bool, on_wait: Callable[[], None]) -> bool:
    """What rank 0 told, or tells soon: ``waiting`` is called until then."""
    if not has_process_group() or dist.get_rank() == 0:
        return own_value
    store = _decision_store()
    while not store.check([key]):
        on_wait()
        time.sleep(DECISION_POLL_S)
    return bool(store.get(key) == str(True).encode())


def _decision_store() -> Any:
    return UNTYPED_DIST.PrefixStore("nfold-agreeing", distributed_c10d._get_default_store())
