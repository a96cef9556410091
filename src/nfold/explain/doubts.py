"""What casts doubt on a budget, and what says that the training itself is wrong."""

from __future__ import annotations

from collections.abc import Mapping

from nfold.explain.causes.undivided_work import SIGN
from nfold.explain.fit import LEAST_FREE, Fit
from nfold.explain.measured import Measured
from nfold.measurement import Doubt

WRONG = (SIGN, "parameters_differ")
"""Doubts that say the training itself is wrong."""
NOT_DOUBTS = (*WRONG, "few_windows", "slow_rank")
"""Doubts that are said elsewhere: runs are short on purpose, and slow ranks have a row."""


def wrong(kinds: Mapping[str, str], whole: str | None) -> tuple[str, ...]:
    """What is wrong, of doubts by their kinds; ``whole``: that ranks get all of the data."""
    found = tuple(text for kind, text in kinds.items() if kind in WRONG)
    return (*found, whole) if whole else found


def warnings(measured: Measured, fit: Fit) -> tuple[Doubt, ...]:
    """The other doubts of all runs, and whether too few were made to see how they differ."""
    found = [doubt for doubt in measured.doubts() if doubt.kind not in NOT_DOUBTS]
    if fit.free < LEAST_FREE:
        text = "too few repeats to see how runs differ: intervals are from inside single runs"
        found.append(Doubt(kind="few_repeats", text=text))
    return tuple(found)
