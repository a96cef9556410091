"""The cost of one step of one rank in closed form, under any interventions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nfold.engines.base import Task
from nfold.engines.simulated.scenario import Scenario


@dataclass(frozen=True)
class StepCosts:
    """The costs of one rank, before it waits for the other ranks."""

    scenario: Scenario
    task: Task

    def is_straggler(self, step: int) -> bool:
        """Whether this rank is the random straggler of a step: every rank equally often."""
        every = self.scenario.random_straggler_every
        return (step * 7919 + step // every) % every == self.task.rank % every

    def step_ms(self, samples: int, straggles: bool) -> float:
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

    def _additive_ms(self, samples: int) -> float:
        scenario, plan, variant = self.scenario, self.task.plan, self.task.variant
        layout = "channels_last" if variant.channels_last else str(plan.layout)
        cost_ms = scenario.layout_ms.get(layout, 0.0)
        if self.loads_on_host:
            cost_ms += scenario.input_ms_per_sample * samples
        if plan.input == "loader" and variant.input != "resident":
            cost_ms += scenario.copy_ms_per_sample * samples
        if variant.host_syncs:
            cost_ms += scenario.host_syncs_ms
        if variant.anomaly_detection:
            cost_ms += scenario.anomaly_ms
        if not variant.expandable_segments:
            cost_ms += scenario.retries_ms + scenario.neighbor_retries_ms * (self._devices - 1)
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
        if variant.exchange in ("real", "half"):
            hidden_ms = scenario.overlap * compute_ms
            transfer_ms = scenario.transfer_ms / (2 if variant.exchange == "half" else 1)
            cost_ms += scenario.exchange_ms + max(0.0, transfer_ms - hidden_ms)
        if self.task.plan.strategy == "dp":
            cost_ms += scenario.dp_exchange_ms
        return cost_ms

    def loader_ms(self, samples: int) -> tuple[float, float]:
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
        """Whether the host reads samples in every step."""
        return self.task.plan.input == "loader" and self.task.variant.input == "real"


def costs_of_rank(scenario: Scenario, task: Task, rank: int) -> StepCosts:
    return StepCosts(scenario, dataclasses.replace(task, rank=rank))
