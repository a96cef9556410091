"""One rank on the virtual clock: windows, losses, epochs and failures of its steps."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from math import ceil
from statistics import fmean

from nfold.core.errors import Diverged, Hung, Killed, OutOfMemory, RunFailure
from nfold.core.interleave import MAX_CYCLES
from nfold.core.measurement import Epoch, EpochGap, FetchStats, RankSamples, Window
from nfold.core.variant import Variant
from nfold.engines.base import Observer, Phase, Task
from nfold.engines.simulated.scenario import (
    OUTLIER_FACTOR,
    PlantedFailure,
    Scenario,
    StepCosts,
    costs_of_rank,
)
from nfold.interventions.registry import REGISTRY

WINDOW_COUNT = 10
REPLAYED_BATCHES = 16
START_LOSS = 2.302585  # ln 10: ten classes, untrained


class Simulation:
    """One rank of one task. Simulations with the same ``tree`` share process-tree noise."""

    def __init__(self, scenario: Scenario, task: Task, tree: str | None = None) -> None:
        self._tree = tree
        self.scenario = scenario
        self.task = task
        self.plan = task.plan
        self.devices = task.plan.devices or 1
        self.devices_per_process = self.devices if task.plan.strategy == "dp" else 1
        self.epochs = _batches_by_epoch(task, scenario)
        self.total_steps = sum(map(len, self.epochs))
        self.warmup_steps = min(max(1, task.plan.warmup_steps or 0), self.total_steps // 2)
        failures = filter(self._occurs, scenario.failures)
        self.failure = min(failures, key=lambda planted: planted.step, default=None)

    def run(self, observer: Observer) -> RankSamples:
        """Run to the end, or to the step in which any rank fails."""
        failure = self.failure
        end = self.total_steps if failure is None else failure.step - 1
        for step in range(end):
            phase = Phase.STEPPING if step else Phase.FIRST_STEP
            observer.beat(phase, step + 1, self.total_steps)
        samples = self.samples(end)
        observer.save(samples)
        if failure is not None and failure.rank == self.task.rank:
            raise self._error(failure)
        return samples

    def samples(self, end: int) -> RankSamples:
        """Return the measurements of this rank's first ``end`` steps."""
        windows, losses = self._windows(end)
        # Without the wait for other ranks, unless the scenario has host gaps.
        step_ms = self.wall_ms if self.scenario.host_gap_ms else self.rank_ms[self.task.rank]
        gap_steps = range(end if self.scenario.host_gap_ms else 0)
        return RankSamples(
            rank=self.task.rank,
            device=f"{self.plan.device}:{self.task.local_rank}",
            first_step_ms=self.wall_ms[0] if end else None,
            warmup_steps=self.warmup_steps,
            windows=windows,
            step_ms=tuple(step_ms[self.warmup_steps : end]),
            host_gaps_ms=tuple(self._host_gap_ms(step, self.task.rank) for step in gap_steps),
            epochs=self._finished_epochs(end) if self.plan.epochs is not None else (),
            losses=losses,
            peak_memory_bytes=self.peak_memory_bytes,
            sample_hashes=self._hashes(end),
            parameter_checksum=self._checksum(),
        )

    @functools.cached_property
    def rank_ms(self) -> list[list[float]]:
        """Milliseconds [rank][step], before ranks wait for each other."""
        return [self._noisy_step_ms(rank) for rank in range(self.task.world_size)]

    @functools.cached_property
    def lockstep_ms(self) -> list[float]:
        """Milliseconds of every step of ranks that wait for the slowest."""
        return [max(step) for step in zip(*self.rank_ms, strict=True)]

    @property
    def wall_ms(self) -> list[float]:
        """Milliseconds of every step on this rank's clock."""
        if self.task.variant.ranks_synchronize:
            return self.lockstep_ms
        return self.rank_ms[self.task.rank]

    def _noisy_step_ms(self, rank: int) -> list[float]:
        costs = costs_of_rank(self.scenario, self.task, rank)
        cost = functools.cache(costs.step_ms)
        exact = [
            cost(
                self._samples_on_device(batch, rank) * self._batch_work(step, rank),
                costs.is_straggler(step),
            )
            for step, batch in enumerate(chain.from_iterable(self.epochs))
        ]
        exact[0] += self.scenario.first_step_ms
        exact = [ms + self._host_gap_ms(step, rank) for step, ms in enumerate(exact)]
        generator = random.Random(f"{self._noise_name()}-{rank}")
        tree = self._tree or self._noise_name()
        factor = random.Random(tree).lognormvariate(0, self.scenario.process_noise)
        found = [ms * factor * generator.lognormvariate(0, self.scenario.noise) for ms in exact]
        return self._disturbed(found, tree, generator)

    def _disturbed(self, exact: list[float], tree: str, generator: random.Random) -> list[float]:
        scenario, steps, drifts = self.scenario, len(exact), [1.0]
        if scenario.drift:
            drawn = random.Random(f"{tree} drift")
            drifts = [drawn.lognormvariate(0, scenario.drift) for _ in range(MAX_CYCLES)]
        found = [ms * drifts[step * len(drifts) // steps] for step, ms in enumerate(exact)]
        if scenario.outlier_fraction:
            sigma = OUTLIER_FACTOR * scenario.noise
            for step in range(steps):
                if generator.random() < scenario.outlier_fraction:
                    found[step] *= math.exp(abs(generator.gauss(0, sigma)))
        return found

    def _batch_index(self, step: int) -> int | None:
        variant = self.task.variant
        if variant.input == "real":
            return None
        # An interleaved variant goes on where the variant before it stopped.
        return (step + random.Random(_noise_label(variant)).randrange(100)) % REPLAYED_BATCHES

    def _batch_work(self, step: int, rank: int) -> float:
        """Return the work of a batch, over that of the mean batch."""
        if not self.scenario.batch_spread:
            return 1.0
        index, repeat = self._batch_index(step), self.task.repeat
        batch = f"{step} of {repeat} real" if index is None else f"{index}"
        drawn = random.Random(f"{self.scenario.noise_seed} {batch} {rank}").random()
        return (1 + drawn * self.scenario.batch_spread) / (1 + self.scenario.batch_spread / 2)

    def _host_gap_ms(self, step: int, rank: int) -> float:
        has_gap = step > 0 and step % self.scenario.host_gap_every == 0
        has_gap = has_gap and self.scenario.host_gap_rank in (None, rank)
        return self.scenario.host_gap_ms if has_gap else 0.0

    def _noise_name(self) -> str:
        task = self.task
        name = f"{self.scenario.noise_seed}-{self.plan.id}"
        if not task.variant and not task.repeat:
            return name
        return f"{name}-{_noise_label(task.variant)}-{task.repeat}"

    def _samples_on_device(self, batch: int, rank: int) -> int:
        if self.devices_per_process > 1:
            return ceil(batch / self.devices)
        return self._samples_of_rank(batch, rank)

    def _samples_of_rank(self, batch: int, rank: int) -> int:
        return (batch + self.task.world_size - 1 - rank) // self.task.world_size

    def _windows(self, end: int) -> tuple[tuple[Window, ...], tuple[tuple[int, float], ...]]:
        size = max(1, ceil((self.total_steps - self.warmup_steps) / WINDOW_COUNT))
        windows, losses = [], []
        for first, last, start_s in self._window_spans(size, end):
            steps = range(first, last)
            samples = sum(
                self._samples_of_rank(self._batch(step), self.task.rank) for step in steps
            )
            windows.append(
                Window(
                    start_s=start_s,
                    seconds=sum(self.wall_ms[first:last]) / 1e3,
                    steps=len(steps),
                    samples=samples,
                    first_step=first,
                    fetches=self._fetches(len(steps), samples),
                    epoch_gap=self._epoch_gap(first),
                    queue_drain_s=self._queue_drain_s(first, last),
                    batch_indices=self._batch_indices(steps),
                )
            )
            losses.append((last, fmean(map(self._loss, steps))))
        return tuple(windows), tuple(losses)

    def _batch_indices(self, steps: range) -> tuple[int, ...]:
        if not self.scenario.batch_spread:
            return ()
        return tuple(i for i in map(self._batch_index, steps) if i is not None)

    def _epoch_gap(self, step: int) -> EpochGap | None:
        steps = len(self.epochs[0])
        if step % steps or not step:
            return None
        if self.task.variant.batches_per_epoch is not None:
            steps = ceil(self.scenario.samples_per_epoch / (self.plan.batch or 1))
        waited_s = self._first_wait_ms / 1e3
        return EpochGap(seconds=self._epoch_gap_ms / 1e3, steps=steps, waited_s=waited_s)

    @functools.cached_property
    def _own_costs(self) -> StepCosts:
        return costs_of_rank(self.scenario, self.task, self.task.rank)

    @property
    def _first_wait_ms(self) -> float:
        return self.scenario.epoch_wait_ms if self._own_costs.loads_on_host else 0.0

    @property
    def _epoch_gap_ms(self) -> float:
        return self.scenario.epoch_gap_ms + self._first_wait_ms

    def _queue_drain_s(self, first: int, last: int) -> float | None:
        if self.plan.device != "cuda":
            return None
        samples = self._samples_of_rank(self._batch(first), 0)
        lead_ms = max(0.0, self.scenario.compute_ms_per_sample * samples - self.scenario.launch_ms)
        return lead_ms * (last - first) / 1e3

    def _fetches(self, batches: int, samples: int) -> FetchStats | None:
        if not self._own_costs.loads_on_host:
            return None
        compute_ms, wait_ms = self._own_costs.loader_ms(samples)
        if not compute_ms + wait_ms:
            return None
        seconds = (compute_ms + wait_ms) / 1e3
        return FetchStats(batches=batches, seconds=seconds, waited_s=wait_ms / 1e3)

    def _window_spans(self, size: int, end: int) -> Iterator[tuple[int, int, float]]:
        clock_ms, first = 0.0, 0
        for number, epoch in enumerate(self.epochs):
            clock_ms += self._epoch_gap_ms if number else 0.0
            stop = min(first + len(epoch), end)
            timed = min(max(first, self.warmup_steps), stop)
            clock_ms += sum(self.wall_ms[first:timed])
            for start in range(timed, stop, size):
                last = min(start + size, stop)
                yield start, last, clock_ms / 1e3
                clock_ms += sum(self.wall_ms[start:last])
            first += len(epoch)

    def _finished_epochs(self, end: int) -> tuple[Epoch, ...]:
        finished: list[Epoch] = []
        first = 0
        for number, epoch in enumerate(self.epochs):
            last = first + len(epoch)
            if last > end:
                break
            gap_ms = self._epoch_gap_ms if number else 0.0
            finished.append(
                Epoch(
                    seconds=(sum(self.wall_ms[first:last]) + gap_ms) / 1e3,
                    samples=sum(epoch),
                    train_loss=fmean(map(self._loss, range(first, last))),
                    accuracy=self.scenario.final_accuracy * (1 - 0.5 ** (number + 1)),
                )
            )
            first = last
        return tuple(finished)

    def _batch(self, step: int) -> int:
        epoch = self.epochs[0]
        return epoch[step % len(epoch)]

    def _loss(self, step: int) -> float:
        return START_LOSS / (1 + 0.02 * step)

    def _hashes(self, end: int) -> tuple[tuple[int, str], ...]:
        shard = 0 if self.scenario.same_samples else self.task.rank
        length = len(self.epochs[0])
        return tuple(
            (
                sum(self._samples_of_rank(batch, shard) for batch in epoch),
                _hash(f"{self.plan.seed}-{number}-{shard}"),
            )
            for number, epoch in enumerate(self.epochs[: end // length])
        )

    def _checksum(self) -> str:
        own = self.task.rank if self.scenario.no_exchange else 0
        return _hash(
            f"{self.task.workload}-{self.plan.seed}-{self.plan.batch}-{self.total_steps}-{own}"
        )

    @property
    def peak_memory_bytes(self) -> int:
        samples = self._samples_on_device(self.plan.batch or 1, self.task.rank)
        return self.scenario.memory_bytes + samples * self.scenario.memory_bytes_per_sample

    def _occurs(self, planted: PlantedFailure) -> bool:
        return (
            planted.rank < self.task.world_size
            and planted.step <= self.total_steps
            and planted.devices in (None, self.devices)
            and ceil((self.plan.batch or 1) / self.devices) >= planted.batch_per_device
        )

    def _error(self, planted: PlantedFailure) -> RunFailure:
        text = f"planted {planted.kind} in step {planted.step}"
        if planted.kind == "oom":
            return OutOfMemory(text, step=planted.step, peak_memory_bytes=self.peak_memory_bytes)
        kinds = {"crash": RunFailure, "hang": Hung, "kill": Killed, "diverged": Diverged}
        return kinds[planted.kind](text, step=planted.step)


def _batches_by_epoch(task: Task, scenario: Scenario) -> list[Sequence[int]]:
    plan, batches = task.plan, task.variant.batches_per_epoch
    batch = plan.batch or 1
    if plan.steps is not None:
        steps = plan.steps + (plan.warmup_steps or 0)
        epoch_steps = steps if batches is None else batches // plan.accumulate
        return [[batch] * epoch_steps] * (steps // epoch_steps)
    full, remainder = divmod(scenario.samples_per_epoch, batch)
    return [[batch] * full + [remainder] * (remainder > 0)] * (plan.epochs or 1)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# The noise of a run is seeded from a text that describes its variant. The text must never change,
# whatever fields are called: the same scenario has the same noise in every version, and the
# simulated diagnosis is compared bit by bit. The text names every value of the first interventions,
# and those of later ones that are not the default.
ALWAYS_NAMED = 22


def _noise_fields(variant: Variant) -> dict[str, object]:
    first = list(REGISTRY.values())[:ALWAYS_NAMED]
    named = {each.stored_name: getattr(variant, each.name) for each in first}
    return named | {each.stored_name: value for each, value in variant.interventions()}


def _noise_label(variant: Variant) -> str:
    changed = [f"{each.stored_name} {value}" for each, value in variant.interventions()]
    return ", ".join(changed) or "nothing left out"


def _noise_repr(variants: Sequence[Variant]) -> str:
    each = [", ".join(f"{k}={v!r}" for k, v in _noise_fields(one).items()) for one in variants]
    comma = "," if len(each) == 1 else ""
    return f"({', '.join(f'Ablation({one})' for one in each)}{comma})"


def simulate_interleaved(scenario: Scenario, task: Task) -> RankSamples:
    """Simulate the interleaved variants one after the other, with the noise of one process tree."""
    tree = (
        f"{scenario.noise_seed}-{task.plan.id}-{_noise_label(task.variant)}-"
        f"{_noise_repr(task.interleaved_variants)}-{task.repeat}"
    )
    samples = []
    for variant in task.interleaved_variants:
        single = dataclasses.replace(task, requested_variant=variant, interleaved_variants=())
        simulation = Simulation(scenario, single, tree)
        samples.append(simulation.samples(simulation.total_steps))
    slots = (repeat(slot, len(one.windows)) for slot, one in enumerate(samples))
    return dataclasses.replace(
        samples[0],
        windows=tuple(chain.from_iterable(one.windows for one in samples)),
        slots=tuple(chain.from_iterable(slots)),
        step_ms=tuple(chain.from_iterable(one.step_ms for one in samples)),
    )
