"""The simulated framework's input, and the cost of a step in closed form, under any interventions."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from typing import Literal

from nfold.core.errors import UnknownValue, UsageError
from nfold.core.plan import PLAN_FIELDS
from nfold.core.serialization import deserialize
from nfold.engines.base import Task
from nfold.interventions.registry import REGISTRY

OUTLIER_FACTOR = 10.0
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
    # by name: costs that an intervention removes; negative: costs that it adds
    intervention_ms: dict[str, float] = field(default_factory=dict)
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
    outlier_fraction: float = 0.0  # of the steps, whose noise is OUTLIER_FACTOR as large
    drift: float = 0.0  # sigma of a factor per part of a run, the same for interleaved variants
    batch_spread: float = 0.0  # most over least work of a batch, less 1; batches are as large
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
        for name in self.intervention_ms:
            if name not in REGISTRY:
                raise UnknownValue("intervention", name, REGISTRY)
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


@dataclass(frozen=True)
class StepCosts:
    """The costs of one rank, before it waits for the other ranks."""

    scenario: Scenario
    task: Task

    def is_straggler(self, step: int) -> bool:
        """Return whether this rank is the random straggler of a step: every rank equally often."""
        every = self.scenario.random_straggler_every
        return (step * 7919 + step // every) % every == self.task.rank % every

    def step_ms(self, samples: float, straggles: bool) -> float:
        """Return the milliseconds of a step with ``samples`` samples on the rank's device."""
        scenario, variant = self.scenario, self.task.variant
        compute_ms = scenario.compute_ms_per_sample * samples
        captured = variant.captured or "captured" in str(self.task.plan.step)
        launch_ms = scenario.launch_ms_compiled.get(variant.compiled, scenario.launch_ms)
        step_ms = compute_ms if captured else max(compute_ms, launch_ms)
        step_ms = step_ms + scenario.host_ms + self._additive_ms(samples)
        step_ms += self._straggler_ms(straggles)
        if self._devices > 1 and not variant.independent:
            step_ms += self._exchange_ms(compute_ms)
        if variant.exchange_after_backward:
            step_ms += scenario.latency_ms + scenario.exchange_ms + scenario.transfer_ms
        if not self.loads_on_host:
            return step_ms
        workers = self.task.plan.workers or 0
        load_ms = sum(self.loader_ms(samples)) / max(1, workers)
        return max(step_ms, load_ms) if workers else step_ms + load_ms

    @property
    def _devices(self) -> int:
        return self.task.plan.devices or 1

    def _additive_ms(self, samples: float) -> float:
        scenario, plan, variant = self.scenario, self.task.plan, self.task.variant
        layout = "channels_last" if variant.channels_last else str(plan.layout)
        cost_ms = scenario.layout_ms.get(layout, 0.0)
        if self.loads_on_host:
            cost_ms += scenario.input_ms_per_sample * samples
        if plan.input == "loader" and variant.input != "resident":
            cost_ms += scenario.copy_ms_per_sample * samples
        for name, intervention in REGISTRY.items():
            value = getattr(variant, name)
            cost_ms += intervention.simulated_ms(value, scenario, self._devices)
        if variant.threads != 1:
            cost_ms += scenario.contention_ms * (self._devices - 1)
        if self.loads_on_host and variant.threads is None:
            cost_ms += scenario.crowding_ms * (self._devices - 1)
        return cost_ms

    def _straggler_ms(self, straggles: bool) -> float:
        scenario, variant, rank = self.scenario, self.task.variant, self.task.rank
        if self.task.plan.strategy == "dp":
            slow = scenario.straggler_rank < self._devices
        else:
            on_device = scenario.straggler_bound_to == "device"
            order = variant.devices if on_device else variant.data_shares
            slow = scenario.straggler_rank == (order[rank] if order else rank + variant.device)
        random_ms = scenario.random_straggler_ms if straggles else 0.0
        return (scenario.straggler_ms if slow else 0.0) + random_ms

    def _exchange_ms(self, compute_ms: float) -> float:
        scenario, variant = self.scenario, self.task.variant
        unused_ms = scenario.unused_ms if variant.find_unused_parameters else 0.0
        cost_ms = scenario.wrapper_ms + unused_ms
        if self.task.plan.batch_norm == "synchronised" and variant.synchronised_batch_norm:
            cost_ms += scenario.batch_norm_ms
        if variant.exchange != "none":
            cost_ms += scenario.latency_ms
            cost_ms += scenario.repeated_ms if variant.exchange_each_micro_batch else 0.0
            cost_ms += scenario.buffers_ms if variant.broadcast_buffers else 0.0
        if variant.exchange == "real":
            hidden_ms = scenario.overlap * compute_ms
            transfer_ms = scenario.transfer_ms / (
                1 if variant.gradient_compression == "none" else 2
            )
            cost_ms += scenario.exchange_ms + max(0.0, transfer_ms - hidden_ms)
        if self.task.plan.strategy == "dp":
            cost_ms += scenario.dp_exchange_ms
        return cost_ms

    def loader_ms(self, samples: float) -> tuple[float, float]:
        """Return the milliseconds that loaders compute and wait for ``samples`` samples."""
        plan, scenario = self.task.plan, self.scenario
        augments = plan.augment == "cpu" and self.task.variant.augmentation
        augment_ms = scenario.augment_ms_per_sample if augments else 0.0
        per_sample_ms = scenario.load_ms_per_sample + augment_ms
        loaders = max(1, plan.workers or 0) * self._devices
        slowdown = max(1.0, loaders / scenario.host_cores) if scenario.host_cores else 1.0
        return samples * per_sample_ms * slowdown, samples * scenario.read_ms_per_sample

    @property
    def loads_on_host(self) -> bool:
        return self.task.plan.input == "loader" and self.task.variant.input == "real"


def costs_of_rank(scenario: Scenario, task: Task, rank: int) -> StepCosts:
    return StepCosts(scenario, dataclasses.replace(task, rank=rank))
