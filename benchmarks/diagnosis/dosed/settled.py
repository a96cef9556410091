"""How many or how large a fault is for its dose: learnt in one process, the same in all others.

A process that is told nothing learns it and prints ``{"settled": {"layout": 31}}``. One that is
told by FAULTS_SETTLED='{"layout": 31}' learns nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

ENVIRONMENT = "FAULTS_SETTLED"


def known(cause: str) -> int | None:
    """What was learnt before, None where nobody has."""
    told: dict[str, int] = json.loads(os.environ.get(ENVIRONMENT) or "{}")
    return told.get(cause)


def settled(cause: str, learn: Callable[[], int]) -> int:
    """What was learnt before, or is learnt now and told."""
    before = known(cause)
    return tell(cause, learn()) if before is None else before


def tell(cause: str, found: int) -> int:
    """Print it, on the first rank; returns it."""
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"settled": {cause: found}}), flush=True)
    return found
