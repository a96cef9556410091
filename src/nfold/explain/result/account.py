"""The account of one step on the requested devices, and the changes that would shorten it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nfold.core.serialization import serialize
from nfold.core.stats import Interval

RowId = Literal[
    "compute",
    "data-loader",
    "communication",
    "synchronization",
    "copies",
    "launch",
    "epoch-boundary",
    "imbalance",
    "threads",
    "layout",
    "memory",
    "single-process",
    "not-attributed",
]
ROW_LABELS: dict[str, str] = {
    "compute": "model compute",
    "data-loader": "data loader",
    "communication": "gradient communication",
    "synchronization": "wrapper and synchronization",
    "copies": "host-to-device copies",
    "launch": "launch overhead",
    "epoch-boundary": "epoch boundary, host work",
    "imbalance": "waiting for slower ranks",
    "threads": "host contention",
    "layout": "memory layout",
    "memory": "memory allocator",
    "single-process": "one process for all devices",
    "not-attributed": "not attributed",
}
WAITING, WORKING = "data loader, waiting", "data loader, working"


@dataclass(frozen=True, kw_only=True)
class AccountRow:
    """One cost of a step on all devices, in milliseconds.

    ``one_device_ms`` is the part that one device by itself loses too, None for rows without
    causes. ``parts`` split the row and add up to it. ``causes`` are the ids behind the row. A row
    that is not ``significant`` is likely: its interval excludes 0, but not by the margin that a
    dozen rows demand.
    """

    id: str
    ms: Interval
    causes: tuple[str, ...] = ()
    one_device_ms: Interval | None = None
    parts: tuple[tuple[str, Interval], ...] = ()
    significant: bool = True

    @property
    def label(self) -> str:
        return ROW_LABELS[self.id]


@dataclass(frozen=True, kw_only=True)
class StepAccount:
    """Where a step goes. The rows add up to ``step_ms``; the largest cost comes first, after
    ``compute``, before ``not-attributed``.

    ``one_device`` is the same account of one device with its share of the batch.
    ``small`` are the rows below the noise, which ``not-attributed`` contains.
    """

    step_ms: Interval
    rows: tuple[AccountRow, ...]
    small: tuple[AccountRow, ...] = ()
    one_device: tuple[AccountRow, ...] = ()

    @property
    def costs(self) -> tuple[AccountRow, ...]:
        """The rows of causes, largest first."""
        return tuple(row for row in self.rows if row.causes)

    @property
    def not_attributed(self) -> AccountRow:
        return self.rows[-1]


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A measured setting and the step that it gives."""

    value: str
    step_ms: Interval
    samples_per_s: Interval


@dataclass(frozen=True, kw_only=True)
class Change:
    """What to write where, and what it gains on the requested devices.

    ``row`` is the id of the account row that it removes. ``location`` is ``train.py:31``, empty
    for a command-line option. ``note`` are other ways and reasons, ``current`` is the present value
    of the setting. ``factor`` is the throughput after the change over that of today; None where nobody can predict it.
    ``alternatives`` are measured values of the setting ``varied``, today's included, in their order.
    """

    row: str
    location: str
    code: str
    note: str = ""
    setting: str = ""
    current: str = ""
    measured: bool = False
    samples_per_s: Interval | None = None
    factor: Interval | None = None
    varied: str = ""
    alternatives: tuple[Alternative, ...] = ()

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        return values


@dataclass(frozen=True, kw_only=True)
class TrialSummary:
    """The step times of one variant, one per run."""

    label: str
    devices: int
    step_ms: tuple[float, ...]
    ids: tuple[str, ...]
