"""What the simulated framework is told: what every step costs, and what goes wrong."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Literal

from nfold.core.errors import UnknownValue, UsageError
from nfold.core.plan import PLAN_FIELDS
from nfold.core.serialization import deserialize

# Environment variable with a script as JSON, for runs that are started from a command line
SCENARIO_VARIABLE = "NFOLD_SIMULATED"


@dataclass(frozen=True, kw_only=True)
class PlantedFailure:
    """One failure: what happens in which step (from 1, warm-up included) on which rank.

    It happens only with at least ``batch_per_device`` samples on a device and, where
    ``devices`` is given, on exactly so many of them.
    """

    kind: Literal["oom", "crash", "hang", "kill", "diverged"]
    step: int = 1
    rank: int = 0
    batch_per_device: int = 1
    devices: int | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What every step costs, in milliseconds, and what goes wrong.

    These hide behind something: ``load_ms_per_sample`` (and ``augment_ms_per_sample``, of the
    plan's CPU augmentation) is the work of a rank's W loaders and hides behind the step; W above
    the share of ``host_cores`` make each other slower; without workers nothing hides it. With it
    goes ``read_ms_per_sample``, in which a loader waits and needs no core. Of
    ``transfer_ms``, the gradients' way, as much hides as the part ``overlap`` of compute.
    ``launch_ms`` of the host is shorter than compute or hides it, unless the step is captured;
    ``launch_ms_compiled`` is that by the mode in which a model is compiled.
    All others add up. ``exchange_ms`` is per step on several devices,
    ``dp_exchange_ms`` on top of it where one process drives them all (``dp``), ``wrapper_ms`` the
    host's part and ``latency_ms`` the part that does not depend on bytes; ``batch_norm_ms`` is
    of synchronised batch norm, ``buffers_ms`` of buffers that a wrapper broadcasts,
    ``layout_ms`` of a layout, ``host_syncs_ms`` of a host that waits for its device,
    ``anomaly_ms`` of autograd that looks for NaN.
    ``retries_ms`` is of an allocator that tries again, unless its segments grow;
    ``retries_beside_ms`` is what every other process that does costs it.
    ``contention_ms`` is what every other process on the host costs one that computes with more
    threads than one, ``crowding_ms`` what it costs one that also reads samples in more threads than
    it has cores. ``repeated_ms`` is of gradients exchanged more than once a step, ``unused_ms``
    of a wrapper that looks for parameters without a gradient.
    ``straggler_ms`` is added on one device, or on the rank with one share of the data,
    ``random_straggler_ms`` in one of ``random_straggler_every`` steps of a rank, another rank's in
    every step; ``first_step_ms`` to the first step; ``pause_ms`` comes after every
    ``pause_every``-th step, on ``pause_rank`` (None: on all), ``epoch_gap_ms`` between two epochs,
    where loaders on the host also keep the first batch waiting for ``epoch_wait_ms``. ``noise`` is
    the standard deviation of a log-normal factor with median 1 on every step, ``process_noise`` of
    one on a whole process tree.
    ``unsupported`` maps a plan's field to the values that are refused. ``in_turns``: experiments on
    one plan may share a process tree. ``same_samples`` and ``no_exchange`` plant two mistakes in
    data-parallel training: no division of the data, no exchange of gradients.
    """

    compute_ms_per_sample: float = 0.01
    input_ms_per_sample: float = 0.0
    copy_ms_per_sample: float = 0.0
    load_ms_per_sample: float = 0.0
    read_ms_per_sample: float = 0.0
    augment_ms_per_sample: float = 0.0
    host_cores: int = 0  # 0: as many as there are loaders
    host_ms: float = 0.0
    launch_ms: float = 0.0
    launch_ms_compiled: dict[str, float] = field(default_factory=dict)
    contention_ms: float = 0.0
    crowding_ms: float = 0.0
    repeated_ms: float = 0.0
    unused_ms: float = 0.0
    wrapper_ms: float = 0.0
    latency_ms: float = 0.0
    transfer_ms: float = 0.0
    overlap: float = 0.5
    batch_norm_ms: float = 0.0
    buffers_ms: float = 0.0
    host_syncs_ms: float = 0.0
    anomaly_ms: float = 0.0
    retries_ms: float = 0.0
    neighbor_retries_ms: float = 0.0
    layout_ms: dict[str, float] = field(default_factory=dict)
    exchange_ms: float = 0.0
    dp_exchange_ms: float = 0.0
    straggler_ms: float = 0.0
    straggler_rank: int = 0
    straggler_bound_to: Literal["device", "data"] = "device"
    random_straggler_ms: float = 0.0
    random_straggler_every: int = 2
    first_step_ms: float = 0.0
    host_gap_ms: float = 0.0
    host_gap_every: int = 20
    host_gap_rank: int | None = None
    epoch_gap_ms: float = 0.0
    epoch_wait_ms: float = 0.0
    noise: float = 0.0
    process_noise: float = 0.0
    noise_seed: int = 0
    samples_per_epoch: int = 50_000
    final_accuracy: float = 0.9
    memory_bytes: int = 2**30
    memory_bytes_per_sample: int = 2**20
    same_samples: bool = False
    no_exchange: bool = False
    failures: tuple[PlantedFailure, ...] = ()
    unsupported: dict[str, tuple[str, ...]] = field(default_factory=dict)
    can_interleave: bool = False

    def __post_init__(self) -> None:
        for name in self.unsupported:
            if name not in PLAN_FIELDS:
                raise UnknownValue("plan field", name, PLAN_FIELDS)
        if self.samples_per_epoch < 1:
            raise UsageError(f"samples_per_epoch {self.samples_per_epoch}: allowed are 1 and more")

    @classmethod
    def from_environment(cls) -> Scenario:
        """The script in ``NFOLD_SIMULATED``, the default one without it; UsageError if wrong."""
        try:
            return deserialize(cls, json.loads(os.environ.get(SCENARIO_VARIABLE) or "{}"))
        except ValueError as error:
            raise UsageError(f"{SCENARIO_VARIABLE} is not a script: {error}") from None
