"""How many or how large a fault is for its dose: learnt in one process, the same in all others.

A process that is told nothing learns it and prints ``{"settled": {"layout 5": 31}}``. One that is
told by FAULTS_SETTLED='{"layout 5": 31}' learns nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

ENVIRONMENT = "FAULTS_SETTLED"


def key(cause: str, dose: float) -> str:
    """What a dose is called."""
    return f"{cause} {dose:g}"


def known(cause: str, dose: float) -> int | None:
    """What was learnt before, None where nobody has."""
    told: dict[str, int] = json.loads(os.environ.get(ENVIRONMENT) or "{}")
    return told.get(key(cause, dose))


def settled(cause: str, dose: float, learn: Callable[[], int]) -> int:
    """What was learnt before, or is learnt now and told."""
    before = known(cause, dose)
    return tell(cause, dose, learn()) if before is None else before


def tell(cause: str, dose: float, found: int) -> int:
    """Print it, on the first rank; returns it."""
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"settled": {key(cause, dose): found}}), flush=True)
    return found
