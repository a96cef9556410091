"""Ranks that decide alike: rank 0 by what it knows, the others by its word.

They hear it through the store of the script's process group; without one each is by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from nfold.frameworks.torch.script.facts import joined
from nfold.frameworks.torch.script.late import PUBLIC

POLL_S = 0.01


def tell(what: str, found: bool) -> None:
    """Rank 0 tells the others what it ``found``."""
    if joined() and dist.get_rank() == 0:
        _store().set(what, str(found))


def heard(what: str, found: bool, waiting: Callable[[], None]) -> bool:
    """What rank 0 told, or tells soon: ``waiting`` is called until then."""
    if not joined() or dist.get_rank() == 0:
        return found
    store = _store()
    while not store.check([what]):
        waiting()
        time.sleep(POLL_S)
    return bool(store.get(what) == str(True).encode())


def _store() -> Any:
    return PUBLIC.PrefixStore("nfold-agreeing", distributed_c10d._get_default_store())
