"""What happened: raw samples per rank and the facts around them, never only a mean."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from nfold.core.machine import Machine
from nfold.core.plan import Plan
from nfold.core.redaction import expand_home
from nfold.core.serialization import deserialize, serialize
from nfold.core.variant import Variant
from nfold.core.workload import Workload

Status = Literal["ok", "oom", "crashed", "hung", "killed", "diverged", "unsupported", "interrupted"]
STATUSES: tuple[str, ...] = get_args(Status)

NO_GRADIENT_EXCHANGE = "gradients were not exchanged"
"""What is said of ranks that each train a model of their own."""
INTERRUPTED_STATUSES: tuple[str, ...] = ("interrupted", "killed")
"""Ended from outside: a rerun of the same grid runs these again, all others are results."""


@dataclass(frozen=True, kw_only=True)
class FetchStats:
    """Batches that the data set of a script gave in some time, in whatever process.

    ``seconds`` add up over the processes that made them. In ``waited_s`` of these they neither
    computed nor wanted a core: they slept for a disk, a network, a lock. ``read_bytes`` is what
    was read from files, ``disk_bytes`` what of it was not in the host's memory.
    """

    batches: int
    seconds: float
    waited_s: float
    read_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class EpochGap:
    """What lies between two passes over the data, in no window.

    ``seconds`` from the last step of one to the first of the next, of a script to its first batch;
    ``steps`` of the former. ``waited_s`` of them a script waits for that batch, its loader's
    workers starting or at work on it.
    """

    seconds: float
    steps: int
    waited_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some consecutive steps of one rank, fenced by device synchronisation at both ends.

    ``first`` is the number of its first step in its process, from 0. ``start_s`` is on the host's
    monotonic clock (the same for every process of the host), ``samples`` counts this rank's own.
    ``fetches`` are those that ended in it, None where nobody could watch them. ``between`` is what
    lies before it where a pass over the data begins with it. ``ahead_s`` is how long the devices
    went on when the host had nothing more for them: long where they are what a step waits for, not
    where they wait for the host. None: not known. ``clock_mhz`` is that of the rank's GPU where it
    was read in that time, and ``clock_held`` what held it back then, such as its power limit.
    """

    start_s: float
    seconds: float
    steps: int
    samples: int
    first_step: int = 0
    fetches: FetchStats | None = None
    epoch_gap: EpochGap | None = None
    queue_drain_s: float | None = None
    clock_mhz: float | None = None
    throttle_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One pass over the training data: wall seconds with everything between its steps.

    ``samples`` counts every rank's; ``train_loss`` is the mean over them, None of a script,
    which keeps it to itself; ``accuracy`` is on
    the whole test set, None where it was not evaluated. Evaluation time is not in ``seconds``.
    """

    seconds: float
    samples: int
    train_loss: float | None
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class OperationPart:
    """One timed part of an operation, such as ``copy to device``: raw seconds per call.

    ``images`` and ``bytes`` are what one call handles over all ranks; ``baseline`` marks a part
    that runs without the devices (another library on the CPU).
    """

    name: str
    seconds: tuple[float, ...]
    images: int
    bytes: int = 0
    baseline: bool = False
    note: str = ""


HostGapKind = Literal["after a step", "after some steps", "between passes"]


@dataclass(frozen=True, kw_only=True)
class HostGapLocation:
    """A line of the user's code that a rank was at while it made no step, for so long in all.

    ``when``: usually after a step, after some steps that are followed by a longer pause, or between
    two passes over the data. It is a line of the loop that trains, or of a function that a trainer
    calls there. ``calls`` is what was called on it: ``evaluate()``, or the line of a package.
    """

    kind: HostGapKind
    location: str
    seconds: float
    callee: str | None = None


@dataclass(frozen=True, kw_only=True)
class RankSamples:
    """What one rank measured. Times are this rank's own; nothing is averaged.

    ``sample_hashes`` has one (count, order-free 64-bit hash as hex) per epoch or, without
    epochs, one for the whole run: ranks that were fed the same samples have the same hash.
    ``parameter_checksum`` is equal on all ranks after a correct data-parallel run, and
    ``parameter_sample`` some of the parameters where it is known that gradients were exchanged.
    ``losses`` holds (step, mean loss over the steps since the one before) points.
    ``turns`` tells, where experiments took turns, which of them every window belongs to.
    ``pauses_ms`` has one entry for every step of a script, untimed ones too: how long its host did
    something else after the step before and did not ask for a batch. Empty: nobody could tell.
    ``paused_at`` are the lines where it did so, as far as it was looked at, the longest first.
    ``pass_starts`` numbers the steps that passes over the data began with, but for the first pass.
    Of ``peak_memory_bytes``, ``data_bytes`` are the part of the training set that stays on the
    device and ``graph_bytes`` what the allocator reserves for CUDA graphs.
    ``reserved_memory_bytes`` is what the framework took from the fullest device, used or not;
    where the peak is what tensors really used, the two differ.
    """

    rank: int
    device: str
    first_step_ms: float | None = None
    warmup_steps: int = 0
    windows: tuple[Window, ...] = ()
    slots: tuple[int, ...] = ()
    step_ms: tuple[float, ...] = ()
    host_gaps_ms: tuple[float, ...] = ()
    host_gap_locations: tuple[HostGapLocation, ...] = ()
    epoch_starts: tuple[int, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    losses: tuple[tuple[int, float], ...] = ()
    parts: tuple[OperationPart, ...] = ()
    peak_memory_bytes: int | None = None
    data_bytes: int | None = None
    graph_bytes: int | None = None
    reserved_memory_bytes: int | None = None
    sample_hashes: tuple[tuple[int, str], ...] = ()
    parameter_checksum: str | None = None
    parameter_sample: tuple[float, ...] = ()
    parameter_count: int | None = None
    caveats: tuple[tuple[str, str], ...] = ()
    """Doubts that the rank itself noticed, as (kind, text); they become warnings."""

    def windows_with_step_times(self) -> Iterator[tuple[Window, tuple[float, ...]]]:
        """Every window with the milliseconds of its steps."""
        first = 0
        for window in self.windows:
            yield window, self.step_ms[first : first + window.steps]
            first += window.steps

    def split_windows(self, parts: Sequence[int], count: int) -> list[RankSamples]:
        """Every window with its steps in the one of ``count`` parts that is named for it."""
        windows: list[list[Window]] = [[] for _ in range(count)]
        times: list[list[float]] = [[] for _ in range(count)]
        for (window, step_ms), part in zip(self.windows_with_step_times(), parts, strict=True):
            windows[part].append(window)
            times[part] += step_ms
        return [
            dataclasses.replace(self, windows=tuple(own), step_ms=tuple(own_ms), slots=())
            for own, own_ms in zip(windows, times, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Caveat:
    """Something that casts doubt on a number; printed beside it. ``kind`` is stable.

    ``value`` is the number in the text where others reckon with it: of ``busy_host`` the cores that
    other processes used on average.
    """

    kind: str
    text: str
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class FailureCause:
    """Why a measurement is not ``ok``: one sentence, and the rank and step where it began.

    ``stalled_s`` are the seconds since a step was made, of a run that nfold ended for its time.
    """

    text: str
    rank: int | None = None
    step: int | None = None
    signal: int | None = None
    stalled_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of one complete plan in a fresh process tree, or its failure.

    ``folder`` is relative to the results folder; ``started_at`` is UTC in ISO 8601;
    ``energy_joules`` covers the timed windows of all devices, None where no device reports
    power. ``wall_seconds`` is the whole run with start-up.
    """

    id: str
    workload: Workload
    plan: Plan
    machine: Machine
    status: Status
    variant: Variant | None = None
    repeat: int = 0
    cause: FailureCause | None = None
    ranks: tuple[RankSamples, ...] = ()
    energy_joules: float | None = None
    warnings: tuple[Caveat, ...] = ()
    started_at: str = ""
    wall_seconds: float = 0.0
    folder: str | None = None

    @property
    def cell(self) -> str:
        """The id that all repeats of the same measurement share."""
        return cell_id(self.workload, self.plan, self.variant, self.machine)

    @property
    def checkpoint_id(self) -> str:
        """The id that its checkpoints have, whatever it imported."""
        return cell_id(self.workload.for_checkpoints, self.plan, self.variant, self.machine)

    @property
    def is_final(self) -> bool:
        """Whether a rerun of the grid may skip it."""
        return self.status not in INTERRUPTED_STATUSES

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``from_dict`` reads them back."""
        values: dict[str, Any] = serialize(self)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measurement:
        """The measurement that ``to_dict`` wrote; ValueError names a wrong entry."""
        return deserialize(cls, values)


def cell_id(workload: Workload, plan: Plan, variant: Variant | None, machine: Machine) -> str:
    """Ten hex digits of what was run where; the same question on the same machine has one."""
    name = " ".join(filter(None, (workload.identity, workload.code, workload.imports)))
    asked = [name, plan.id, (variant or Variant()).to_dict(), machine.id]
    asked += [(name, expand_home(value)) for name, value in workload.variables]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:10]


class MeasurementStore(Protocol):
    """``nfold.store.store.Store``, or what stands in for it."""

    def find(self, cell: str, repeat: int) -> Measurement | None:
        """The latest measurement of a cell's repeat, or None."""

    def append(self, measurement: Measurement) -> None:
        """Keep a measurement; it is durable when this returns."""
