"""The simulated framework's input: the costs of every step and the planted failures."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Literal

from nfold.core.errors import UnknownValue, UsageError
from nfold.core.plan import PLAN_FIELDS
from nfold.core.serialization import deserialize

SCENARIO_VARIABLE = "NFOLD_SIMULATED"  # a scenario as JSON, for the command line


@dataclass(frozen=True, kw_only=True)
class PlantedFailure:
    """A failure of one rank in one step (from 1, including warm-up).

    Happens only with at least ``batch_per_device`` samples on a device, and with exactly
    ``devices`` devices unless None.
    """

    kind: Literal["oom", "crash", "hang", "kill", "diverged"]
    step: int = 1
    rank: int = 0
    batch_per_device: int = 1
    devices: int | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The costs of every step in milliseconds, and the planted failures.

    Costs add up, except for:

    - ``load_ms_per_sample``, ``read_ms_per_sample`` and ``augment_ms_per_sample`` of a rank's
      workers overlap with the step (without workers they add up)
    - ``transfer_ms`` overlaps with the fraction ``overlap`` of compute
    - ``launch_ms`` overlaps with compute; a captured step has none
    """

    compute_ms_per_sample: float = 0.01
    input_ms_per_sample: float = 0.0
    copy_ms_per_sample: float = 0.0
    load_ms_per_sample: float = 0.0  # of the workers, on a core
    read_ms_per_sample: float = 0.0  # of the workers, waiting without a core
    augment_ms_per_sample: float = 0.0  # of the workers, with CPU augmentation
    host_cores: int = 0  # more workers than cores slow each other down; 0: unlimited
    host_ms: float = 0.0
    launch_ms: float = 0.0
    launch_ms_compiled: dict[str, float] = field(default_factory=dict)  # by compile mode
    contention_ms: float = 0.0  # per other process, if a process computes with several threads
    crowding_ms: float = 0.0  # per other process, if loading uses more threads than cores
    repeated_ms: float = 0.0  # gradients are exchanged for every micro-batch
    unused_ms: float = 0.0  # the wrapper searches for parameters without a gradient
    wrapper_ms: float = 0.0  # host time of the wrapper, on several devices
    latency_ms: float = 0.0  # of the exchange, independent of bytes
    transfer_ms: float = 0.0  # of the gradients
    overlap: float = 0.5
    batch_norm_ms: float = 0.0  # of synchronised batch norm
    buffers_ms: float = 0.0  # of broadcast buffers
    host_syncs_ms: float = 0.0  # the host waits for its device
    anomaly_ms: float = 0.0  # of autograd's anomaly detection
    retries_ms: float = 0.0  # of allocation retries without expandable segments
    neighbor_retries_ms: float = 0.0  # the same per other process
    layout_ms: dict[str, float] = field(default_factory=dict)  # by layout
    exchange_ms: float = 0.0  # on several devices
    dp_exchange_ms: float = 0.0  # added to it if one process drives all devices
    straggler_ms: float = 0.0
    straggler_rank: int = 0
    straggler_bound_to: Literal["device", "data"] = "device"  # or to the share of the data
    random_straggler_ms: float = 0.0
    random_straggler_every: int = 2  # one of so many steps of a rank
    first_step_ms: float = 0.0  # added to the first step
    host_gap_ms: float = 0.0  # after every ``host_gap_every``-th step
    host_gap_every: int = 20
    host_gap_rank: int | None = None  # None: all ranks
    epoch_gap_ms: float = 0.0  # between two epochs
    epoch_wait_ms: float = 0.0  # for the first batch of an epoch, if the host loads samples
    noise: float = 0.0  # sigma of a log-normal factor of median 1 per step
    process_noise: float = 0.0  # the same per process tree
    noise_seed: int = 0
    samples_per_epoch: int = 50_000
    final_accuracy: float = 0.9
    memory_bytes: int = 2**30
    memory_bytes_per_sample: int = 2**20
    same_samples: bool = False  # mistake: every rank trains on the same samples
    no_exchange: bool = False  # mistake: gradients are not exchanged
    failures: tuple[PlantedFailure, ...] = ()
    unsupported: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by plan field
    can_interleave: bool = False  # variants can share a process tree

    def __post_init__(self) -> None:
        for name in self.unsupported:
            if name not in PLAN_FIELDS:
                raise UnknownValue("plan field", name, PLAN_FIELDS)
        if self.samples_per_epoch < 1:
            raise UsageError(f"samples_per_epoch {self.samples_per_epoch}: must be at least 1")

    @classmethod
    def from_environment(cls) -> Scenario:
        """Read the scenario in NFOLD_SIMULATED, by default ``Scenario()``; raises UsageError."""
        try:
            return deserialize(cls, json.loads(os.environ.get(SCENARIO_VARIABLE) or "{}"))
        except ValueError as error:
            raise UsageError(
                f"{SCENARIO_VARIABLE} is not a scenario: {error}; next: use Scenario's fields"
            ) from None
