"""Measurements: raw samples of every rank, and the facts about a run."""

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

NO_GRADIENT_EXCHANGE = "gradients were not exchanged"  # if each rank trains its own model
INTERRUPTED_STATUSES: tuple[str, ...] = ("interrupted", "killed")  # a rerun measures these again


@dataclass(frozen=True, kw_only=True)
class FetchStats:
    """Batches that the data set of a script returned, in all processes.

    Attributes:
        seconds: sum over the processes that made the batches.
        waited_s: the part in which they slept: for a disk, a network, a lock.
        read_bytes: read from files.
        disk_bytes: the part that was not cached in the host's memory.
    """

    batches: int
    seconds: float
    waited_s: float
    read_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class EpochGap:
    """The time between two epochs, which is in no window.

    Attributes:
        seconds: from the last step of an epoch to the first step of the next; of a script, to its
            first batch.
        steps: steps of the earlier epoch.
        waited_s: the part in which a script waited for that batch.
    """

    seconds: float
    steps: int
    waited_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Window:
    """Consecutive steps of one rank, between two synchronisations with the device.

    Attributes:
        start_s: on the host's monotonic clock, which is the same for all of its processes.
        samples: of this rank.
        first_step: number of the first step in its process, from 0.
        fetches: fetches that ended in the window, None if they could not be observed.
        epoch_gap: the gap before the window, if an epoch begins with it.
        queue_drain_s: how long the devices worked after the host's last call. Long if steps wait
            for the devices, short if the devices wait for the host. None: unknown.
        exchange_wait_s: how long a CPU device waited for the gradient exchange after its own
            backward. None: not measured.
        batch_indices: of every step, which of the stored batches was replayed. Empty: none was.
        clock_mhz: clock of the rank's GPU, if it was read in the window.
        throttle_reason: why the clock was limited, such as the power limit.
    """

    start_s: float
    seconds: float
    steps: int
    samples: int
    first_step: int = 0
    fetches: FetchStats | None = None
    epoch_gap: EpochGap | None = None
    queue_drain_s: float | None = None
    exchange_wait_s: float | None = None
    batch_indices: tuple[int, ...] = ()
    clock_mhz: float | None = None
    throttle_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One pass over the training data.

    Attributes:
        seconds: wall time without evaluation.
        samples: of all ranks.
        train_loss: mean over all samples, None for a script.
        accuracy: on the test set, None if it was not evaluated.
    """

    seconds: float
    samples: int
    train_loss: float | None
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class OperationPart:
    """One timed part of an operation, such as ``copy to device``.

    Attributes:
        seconds: per call.
        images, bytes: per call, over all ranks.
        baseline: the part runs without the devices (another library on the CPU).
    """

    name: str
    seconds: tuple[float, ...]
    images: int
    bytes: int = 0
    baseline: bool = False
    note: str = ""


HostGapKind = Literal["after a step", "after some steps", "between passes"]
STARTS_WORKERS = "starts loader workers"  # the callee where a DataLoader starts or ends its workers


@dataclass(frozen=True, kw_only=True)
class HostGapLocation:
    """A line of user code that a rank executed while it made no step.

    Attributes:
        kind: after most steps, after some steps with a longer gap, or between epochs.
        location: line of the training loop, or of a function that a trainer calls there.
        seconds: in total.
        callee: function that the line called, ``evaluate()``, the line of a package, or
            ``STARTS_WORKERS``.
    """

    kind: HostGapKind
    location: str
    seconds: float
    callee: str | None = None


@dataclass(frozen=True, kw_only=True)
class ParameterPart:
    """The trained parameters of a part of the model on one rank.

    Attributes:
        name: path of the module, at most two names deep.
        checksum: of all its numbers, or before the first step of some.
        sample: a few of its numbers.
        trained_from: steps before all of its parameters had a gradient.
    """

    name: str
    checksum: str
    sample: tuple[float, ...] = ()
    trained_from: int = 0


@dataclass(frozen=True, kw_only=True)
class ParameterState:
    """The trained parameters of one rank after ``step`` steps; 0 is before the first."""

    step: int
    parts: tuple[ParameterPart, ...]


@dataclass(frozen=True, kw_only=True)
class RankSamples:
    """Raw samples of one rank; nothing is averaged.

    Attributes:
        slots: for interleaved variants, the index of each window's variant.
        host_gaps_ms: for every step of a script, also untimed ones, how long the host did something
            else after the step before it. Empty: not observed.
        host_gap_locations: sampled lines of these gaps, the longest first.
        epoch_starts: numbers of the steps that epochs began with, except the first epoch.
        losses: (step, mean loss over the steps since the previous point).
        peak_memory_bytes: with ``data_bytes`` of the resident training set and ``graph_bytes`` of
            CUDA graphs.
        reserved_memory_bytes: allocated by the framework on the fullest device, used or not.
        sample_hashes: (count, order-independent 64-bit hash as hex) per epoch, or one for a run
            without epochs. Equal for ranks with the same samples.
        parameter_checksum: equal on all ranks after a correct data-parallel run.
        parameter_sample: some parameters, if gradients are known to be exchanged.
        parameter_states: before the first step and at the end, by parts of the model.
        batch_hashes: of the contents of the first batches of the first epoch, in order.
        input_hashes: of the first inputs of the model, after what the loop did with the batches.
        generator_states: hashes of the random number generators at these inputs; empty if the model
            has dropout.
        indexed_samples: (index in the data set, hash of its labels) of the first samples.
        sampler_epochs: the epoch of a shuffling DistributedSampler at the start of every epoch.
        batches_per_epoch: length of the DataLoader that feeds the training, None if unknown.
        skipped_batches: taken from that DataLoader without a step, None if unknown.
        left_at: where a script that ended by itself left its training loop, empty if unknown; None
            if nfold ended it.
        caveats: (kind, text) that the rank itself noticed.
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
    parameter_states: tuple[ParameterState, ...] = ()
    batch_hashes: tuple[str, ...] = ()
    input_hashes: tuple[str, ...] = ()
    generator_states: tuple[str, ...] = ()
    indexed_samples: tuple[tuple[int, int], ...] = ()
    sampler_epochs: tuple[int, ...] = ()
    batches_per_epoch: int | None = None
    skipped_batches: int | None = None
    left_at: str | None = None
    parameter_count: int | None = None
    caveats: tuple[tuple[str, str], ...] = ()

    def windows_with_step_times(self) -> Iterator[tuple[Window, tuple[float, ...]]]:
        """Yield every window with the milliseconds of its steps."""
        first = 0
        for window in self.windows:
            yield window, self.step_ms[first : first + window.steps]
            first += window.steps

    def split_windows(self, parts: Sequence[int], count: int) -> list[RankSamples]:
        """Split into ``count`` samples; window i goes into number ``parts[i]``."""
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
    """Why a number is uncertain. ``kind`` is stable.

    ``value`` is the number in the text, for computations: of ``busy_host`` the cores that other
    processes used on average.
    """

    kind: str
    text: str
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class FailureCause:
    """Why a measurement is not ``ok``: a sentence, and the rank and step where it began.

    ``stalled_s`` is the time since the last step of a run that reached its time limit.
    ``out_of_step``: ranks wait for each other in different places.
    """

    text: str
    rank: int | None = None
    step: int | None = None
    signal: int | None = None
    stalled_s: float | None = None
    out_of_step: bool = False


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of a complete plan in its own process tree, or its failure.

    Attributes:
        energy_joules: of all devices in the timed windows, None if no device reports power.
        started_at: UTC, ISO 8601.
        wall_seconds: of the whole run, with start-up.
        folder: relative to the results folder.
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
        """The id that all repeats share."""
        return cell_id(self.workload, self.plan, self.variant, self.machine)

    @property
    def checkpoint_id(self) -> str:
        """The id of its checkpoints, which does not depend on imported files."""
        return cell_id(self.workload.for_checkpoints, self.plan, self.variant, self.machine)

    @property
    def is_final(self) -> bool:
        """Return whether a rerun skips it."""
        return self.status not in INTERRUPTED_STATUSES

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measurement:
        """Return the measurement that ``to_dict`` wrote. ValueError names an invalid entry."""
        return deserialize(cls, values)


def cell_id(workload: Workload, plan: Plan, variant: Variant | None, machine: Machine) -> str:
    """Ten hex digits of a workload, plan and variant on a machine."""
    name = " ".join(filter(None, (workload.identity, workload.code, workload.imports)))
    key = [name, plan.id, (variant or Variant()).to_dict(), machine.id]
    key += [(name, expand_home(value)) for name, value in workload.variables]
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:10]


class MeasurementStore(Protocol):
    """The interface of ``nfold.store.store.Store`` that runs need."""

    def find(self, cell: str, repeat: int) -> Measurement | None:
        """Return the latest measurement of a cell's repeat, or None."""

    def append(self, measurement: Measurement) -> None:
        """Store a measurement durably."""
