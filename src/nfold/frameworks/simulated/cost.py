"""What one step costs one rank of a script, in closed form, with or without an ablation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nfold.frameworks.base import Task
from nfold.frameworks.simulated.script import Script


@dataclass(frozen=True)
class Costs:
    """The costs of one rank. ``of`` is a step's, before the rank waits for the others."""

    script: Script
    task: Task

    def late(self, step: int) -> bool:
        """Whether this rank is the random straggler of a step.

        A multiplicative walk: every rank is as often late as the others, in no order of time.
        """
        every = self.script.random_straggler_every
        return (step * 7919 + step // every) % every == self.task.rank % every

    def of(self, samples: int, *, late: bool) -> float:
        """Milliseconds of a step over ``samples`` on the rank's device."""
        compute = self.script.compute_ms_per_sample * samples
        busy = self._launched(compute) + self.script.host_ms + self._beside(samples)
        busy += self._straggling(late)
        if self._exchanging:
            busy += self._exchange(compute)
        if self.task.left_out.late_exchange:
            busy += self.script.latency_ms + self.script.exchange_ms + self.script.transfer_ms
        return self._fed(busy, samples)

    @property
    def _exchanging(self) -> bool:
        return self._devices > 1 and not self.task.left_out.independent

    @property
    def _devices(self) -> int:
        return self.task.plan.devices or 1

    def _launched(self, compute: float) -> float:
        """Compute, or the host's launches where those take longer and are not replayed."""
        left_out = self.task.left_out
        captured = left_out.captured or "captured" in str(self.task.plan.step)
        launch_ms = self.script.launch_ms_compiled.get(left_out.compiled, self.script.launch_ms)
        return compute if captured else max(compute, launch_ms)

    def _beside(self, samples: int) -> float:
        """What adds up on every rank whether or not it exchanges."""
        script, plan, left_out = self.script, self.task.plan, self.task.left_out
        layout = "channels_last" if left_out.channels_last else str(plan.layout)
        cost = script.layout_ms.get(layout, 0.0)
        if self.host_fed:
            cost += script.input_ms_per_sample * samples
        if plan.input == "loader" and left_out.input != "resident":
            cost += script.copy_ms_per_sample * samples
        if left_out.host_syncs:
            cost += script.host_syncs_ms
        if left_out.anomaly_detection:
            cost += script.anomaly_ms
        if not left_out.expandable_segments:
            cost += script.retries_ms + script.retries_beside_ms * (self._devices - 1)
        if left_out.threads != 1:
            cost += script.contention_ms * (self._devices - 1)
        if self.host_fed and left_out.threads is None:
            cost += script.crowding_ms * (self._devices - 1)
        return cost

    def _straggling(self, late: bool) -> float:
        script, left_out = self.script, self.task.left_out
        if self.task.plan.strategy == "dp":
            slow = script.straggler_rank < self._devices
        else:
            order = left_out.devices if script.straggler_of == "device" else left_out.shares
            own = order[self.task.rank] if order else self.task.rank + left_out.device
            slow = script.straggler_rank == own
        random_ms = script.random_straggler_ms if late else 0.0
        return (script.straggler_ms if slow else 0.0) + random_ms

    def _exchange(self, compute: float) -> float:
        script, left_out = self.script, self.task.left_out
        cost = script.wrapper_ms + (script.unused_ms if left_out.unused_parameters else 0.0)
        if self.task.plan.batch_norm == "synchronised" and left_out.synchronised_batch_norm:
            cost += script.batch_norm_ms
        if left_out.exchange != "none":
            cost += script.latency_ms
            cost += script.repeated_ms if left_out.repeated_exchange else 0.0
            cost += script.buffers_ms if left_out.buffers else 0.0
        if left_out.exchange in ("real", "half"):
            hidden = script.overlap * compute
            sent_ms = script.transfer_ms / (2 if left_out.exchange == "half" else 1)
            cost += script.exchange_ms + max(0.0, sent_ms - hidden)
        if self.task.plan.strategy == "dp":
            cost += script.dp_exchange_ms
        return cost

    def _fed(self, busy: float, samples: int) -> float:
        """The step, or the loaders' time for its samples where that is longer."""
        if not self.host_fed:
            return busy
        workers = self.task.plan.workers or 0
        load = sum(self.fetching(samples)) / max(1, workers)
        return max(busy, load) if workers else busy + load

    def fetching(self, samples: int) -> tuple[float, float]:
        """Milliseconds that loaders compute for so many samples, and that they wait."""
        plan, script = self.task.plan, self.script
        cpu = plan.augment == "cpu" and self.task.left_out.augmentation
        per_sample = script.load_ms_per_sample + (script.augment_ms_per_sample if cpu else 0.0)
        loaders = max(1, plan.workers or 0) * self._devices
        crowded = max(1.0, loaders / script.host_cores) if script.host_cores else 1.0
        return samples * per_sample * crowded, samples * script.read_ms_per_sample

    @property
    def host_fed(self) -> bool:
        """Whether the host reads samples in every step."""
        return self.task.plan.input == "loader" and self.task.left_out.input == "real"


def of_rank(script: Script, task: Task, rank: int) -> Costs:
    """The costs of another rank of the same task."""
    return Costs(script, dataclasses.replace(task, rank=rank))
