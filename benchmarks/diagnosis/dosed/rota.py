"""Which doses a script has now: FAULTS='{"imbalance": 5, "input": 2}', or several in turn.

A list of such objects has one turn each, in one run, while the script's own clock tells what a
step takes: FAULTS='[{}, {"link": 3}, {"link": 6}]'. Only doses that are spent in a step can be
in a list; what workers do was made long before.
"""

from __future__ import annotations

import json
import os
from functools import cache

ENVIRONMENT = "FAULTS"
RECURRING = {f"{who}every-{k}": k for who in ("", "all-") for k in (5, 20, 50)}
"""What comes after every so many steps only, on rank 0 or on all."""
EVERY = {"every-1": 1, **RECURRING}
"""What comes after steps: after all of them, rank 0 is slower than the others."""
CAUSES = (
    *EVERY,
    "input",
    "storage",
    "imbalance",
    "imbalance-0",
    "synchronization",
    "link",
    "layout",
    "copies",
    "epoch-boundary",
    "host-syncs",
    "host-work",
    "memory",
    "pass-0",
    "threads",
    "undivided-work",
)
Doses = dict[str, float]
_turn = 0


def turns() -> list[Doses]:
    """All that FAULTS asks for, one after the other; by cause."""
    return _read(os.environ.get(ENVIRONMENT) or "{}")


@cache
def _read(text: str) -> list[Doses]:
    """Once: a step asks for its doses several times."""
    asked: Doses | list[Doses] = json.loads(text)
    every = asked if isinstance(asked, list) else [asked]
    unknown = sorted({cause for one in every for cause in one} - set(CAUSES))
    if unknown:
        raise ValueError(f"{ENVIRONMENT} {unknown[0]!r}: allowed are {', '.join(CAUSES)}")
    return [{cause: float(dose) for cause, dose in one.items() if dose} for one in every]


def doses() -> Doses:
    """Those of the present turn."""
    return turns()[_turn]


def turn() -> int:
    """The number of the present turn, from 0."""
    return _turn


def next_turn() -> bool:
    """Go on to the next turn; whether there is one."""
    global _turn  # one script, one clock: who asks for doses knows of neither
    if _turn + 1 == len(turns()):
        return False
    _turn += 1
    return True
