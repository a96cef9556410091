"""The content of a tuning's page, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nfold.report.explanation import DetailTable


@dataclass(frozen=True, kw_only=True)
class TuneBar:
    """A bar of the waterfall in milliseconds; ``low`` and ``high`` bound where it ends."""

    label: str
    kind: Literal["step", "remedy", "difference", "left"]
    start: float
    end: float
    low: float
    high: float
    text: str


@dataclass(frozen=True, kw_only=True)
class TunePageContent:
    """``bars`` lead from the original to N-fold speed; ``notes`` say what is kept where."""

    target: str
    headline: str
    bars: tuple[TuneBar, ...]
    tables: tuple[DetailTable, ...]
    notes: tuple[str, ...] = ()
