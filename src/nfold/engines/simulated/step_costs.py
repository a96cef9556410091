"""What one step costs one rank of a script, in closed form, with or without an ablation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nfold.engines.base import Task
from nfold.engines.simulated.scenario import Scenario


@dataclass(frozen=True)
class StepCosts:
    """The costs of one rank. ``of`` is a step's, before the rank waits for the others."""

    scenario: Scenario
    task: Task

    def is_straggler(self, step: int) -> bool:
        """Whether this rank is the random straggler of a step.

        A multiplicative walk: every rank is as often late as the others, in no order of time.
        """
        every = self.scenario.random_straggler_every
        return (step * 7919 + step // every) % every == self.task.rank % every

    def step_ms(self, samples: int, *, straggles: bool) -> float:
        """Milliseconds of a step over ``samples`` on the rank's device."""
        compute = self.scenario.compute_ms_per_sample * samples
        busy = (
            self._compute_or_launch_ms(compute) + self.scenario.host_ms + self._additive_ms(samples)
        )
        busy += self._straggler_ms(straggles)
        if self._communicates:
            busy += self._exchange_ms(compute)
        if self.task.variant.exchange_after_backward:
            busy += self.scenario.latency_ms + self.scenario.exchange_ms + self.scenario.transfer_ms
        return self._with_loader_time(busy, samples)

    @property
    def _communicates(self) -> bool:
        return self._devices > 1 and not self.task.variant.independent

    @property
    def _devices(self) -> int:
        return self.task.plan.devices or 1

    def _compute_or_launch_ms(self, compute: float) -> float:
        left_out = self.task.variant
        captured = left_out.captured or "captured" in str(self.task.plan.step)
        launch_ms = self.scenario.launch_ms_compiled.get(left_out.compiled, self.scenario.launch_ms)
        return compute if captured else max(compute, launch_ms)

    def _additive_ms(self, samples: int) -> float:
        script, plan, left_out = self.scenario, self.task.plan, self.task.variant
        layout = "channels_last" if left_out.channels_last else str(plan.layout)
        cost = script.layout_ms.get(layout, 0.0)
        if self.loads_on_host:
            cost += script.input_ms_per_sample * samples
        if plan.input == "loader" and left_out.input != "resident":
            cost += script.copy_ms_per_sample * samples
        if left_out.host_syncs:
            cost += script.host_syncs_ms
        if left_out.anomaly_detection:
            cost += script.anomaly_ms
        if not left_out.expandable_segments:
            cost += script.retries_ms + script.neighbor_retries_ms * (self._devices - 1)
        if left_out.threads != 1:
            cost += script.contention_ms * (self._devices - 1)
        if self.loads_on_host and left_out.threads is None:
            cost += script.crowding_ms * (self._devices - 1)
        return cost

    def _straggler_ms(self, straggles: bool) -> float:
        script, left_out = self.scenario, self.task.variant
        if self.task.plan.strategy == "dp":
            slow = script.straggler_rank < self._devices
        else:
            order = (
                left_out.devices if script.straggler_bound_to == "device" else left_out.data_shares
            )
            own = order[self.task.rank] if order else self.task.rank + left_out.device
            slow = script.straggler_rank == own
        random_ms = script.random_straggler_ms if straggles else 0.0
        return (script.straggler_ms if slow else 0.0) + random_ms

    def _exchange_ms(self, compute: float) -> float:
        script, left_out = self.scenario, self.task.variant
        cost = script.wrapper_ms + (script.unused_ms if left_out.find_unused_parameters else 0.0)
        if self.task.plan.batch_norm == "synchronised" and left_out.synchronised_batch_norm:
            cost += script.batch_norm_ms
        if left_out.exchange != "none":
            cost += script.latency_ms
            cost += script.repeated_ms if left_out.exchange_each_micro_batch else 0.0
            cost += script.buffers_ms if left_out.broadcast_buffers else 0.0
        if left_out.exchange in ("real", "half"):
            hidden = script.overlap * compute
            sent_ms = script.transfer_ms / (2 if left_out.exchange == "half" else 1)
            cost += script.exchange_ms + max(0.0, sent_ms - hidden)
        if self.task.plan.strategy == "dp":
            cost += script.dp_exchange_ms
        return cost

    def _with_loader_time(self, busy: float, samples: int) -> float:
        if not self.loads_on_host:
            return busy
        workers = self.task.plan.workers or 0
        load = sum(self.loader_ms(samples)) / max(1, workers)
        return max(busy, load) if workers else busy + load

    def loader_ms(self, samples: int) -> tuple[float, float]:
        """Milliseconds that loaders compute for so many samples, and that they wait."""
        plan, script = self.task.plan, self.scenario
        cpu = plan.augment == "cpu" and self.task.variant.augmentation
        per_sample = script.load_ms_per_sample + (script.augment_ms_per_sample if cpu else 0.0)
        loaders = max(1, plan.workers or 0) * self._devices
        crowded = max(1.0, loaders / script.host_cores) if script.host_cores else 1.0
        return samples * per_sample * crowded, samples * script.read_ms_per_sample

    @property
    def loads_on_host(self) -> bool:
        """Whether the host reads samples in every step."""
        return self.task.plan.input == "loader" and self.task.variant.input == "real"


def costs_of_rank(scenario: Scenario, task: Task, rank: int) -> StepCosts:
    """The costs of another rank of the same task."""
    return StepCosts(scenario, dataclasses.replace(task, rank=rank))
