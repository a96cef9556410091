"""The input pipeline: copies to the device, making batches on the host, reading from storage."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np

from nfold.core.input_rates import host_decodes_for_gpus
from nfold.core.variant import Variant
from nfold.explain.advice import pytorch
from nfold.explain.causes.cause import Cause
from nfold.explain.causes.collectives import LINK, NETWORK, SYNCHRONIZATION
from nfold.explain.causes.cost_model import (
    Contrast,
    CostModel,
    has_input,
    is_input_bound,
    without_retries,
)
from nfold.explain.causes.epoch_boundary import EPOCH_BOUNDARY
from nfold.explain.causes.host_processes import THREADS
from nfold.explain.causes.work_division import IMBALANCE
from nfold.explain.design import (
    ExperimentDesign,
    Trial,
    barrier_only,
    host_input,
    no_allreduce,
    one_allreduce,
    replicas,
    with_expandable_segments,
)
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.estimate.samples import Samples, ratio
from nfold.explain.metrics import loading_ms_per_step

CANNOT_REPLAY_INPUT = (
    "no DataLoader or batch function found, whose batches could be replayed; next: "
    "nfold.batches() around what yields the batches"
)
WORKER_FACTORS = (2, 4)  # of a script's number of workers, to try
CpuAndStorage = tuple[
    Samples, Samples
]  # milliseconds of computing batches, and of waiting for storage


class CopiesCause(Cause):
    """Copies from host to device that compute does not hide: replayed against resident batches."""

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if design.plan.device != "cuda":
            return "CPU devices use host memory"
        if not design.can_replay_input:
            return CANNOT_REPLAY_INPUT
        function = design.facts.batch_function
        if function is not None and function.on_device:
            return f"{function.call_text} makes a batch and copies it: both are in input"
        return "the data are on the device" if design.plan.input == "resident" else None

    def contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        if design.is_one_process_script:
            return ()
        host, resident = (one_allreduce(design, at) for at in (host_input(design), "resident"))
        (single,) = self.one_device_contrasts(design)
        return (Contrast(host, resident, less=single),)

    def one_device_contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        return (Contrast(design.one_device(host_input(design)), design.one_device("resident")),)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is not None:
            return pytorch.use_pinned_copies(design.profile)
        if design.is_operation:
            return "keep images and results on the devices between calls, or compute more per call"
        return "keep the data on the device: --input resident"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        if design.profile is not None or design.is_operation:
            return {}
        return {"--input resident": _resident_data_set(design)}


COPIES = CopiesCause("copies", occupies_device=True)


def _resident_data_set(design: ExperimentDesign) -> Trial:
    return design.actual().edit(input="resident", augment="device", workers=0)


class InputCause(Cause):
    """Loading, decoding and augmenting on the host, and loaders that slow each other."""

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if not design.can_replay_input:
            return CANNOT_REPLAY_INPUT
        return "the data are on the device" if design.plan.input == "resident" else None

    def one_device_contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        real, replayed = design.one_device("real"), design.one_device("replayed")
        return (without_retries(design, real, replayed),)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.facts.shared_cores:
            return pytorch.restore_affinity(design.facts)
        if design.profile is not None:
            tried = [t.plan.workers or 0 for t in self.fixes(design).values() if view.has(t)]
            return pytorch.speed_up_input(design.profile, _sufficient_workers(design), tried)
        if not design.plan.workers:
            return "load in worker processes (--workers 2), or --input resident"
        *most, last = self.fixes(design)
        return f"{', '.join(most)} or {last} (measure them)"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        full, plan = design.actual(), design.plan
        workers = plan.workers or 0
        facts = design.facts
        renewed = facts.training_loader.renewed_at is not None
        cannot_use_workers = renewed or bool(facts.cached_input_fraction or facts.shared_cores)
        if cannot_use_workers or facts.batch_function is not None:
            return {}
        others = _other_workers(workers, _sufficient_workers(design))
        if design.profile is not None:
            return _with_workers(design, others)
        found = {}
        if host_decodes_for_gpus(plan) and plan.cache == "off":
            on_device = full.edit(decode="device", augment="device")
            found["--decode device --augment device"] = on_device
        found["--input resident"] = _resident_data_set(design)
        if plan.augment == "cpu":
            found["--augment device"] = full.edit(augment="device")
        for other in others[: 2 if workers else 1]:
            found[f"--workers {other}"] = full.edit(workers=other)
        return found


class StorageCause(InputCause):
    """Waiting for a disk or a network: the part of the cost of input in which nobody computes.

    The cost of input comes from real against replayed batches. In the same trials, nfold measures
    how long every process that makes batches computes (or waits for a core) and how long it sleeps.
    """

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if design.profile is None:
            return "the data are in memory before the first step"
        if not design.can_replay_input:
            return CANNOT_REPLAY_INPUT
        function = design.facts.batch_function
        if function is not None:
            return f"waiting in {function.call_text} is not measured: it is in input"
        if design.profile.fetches is None:
            return "the processes that make batches are not measured (spawned workers)"
        return None

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        return pytorch.speed_up_reads(design.facts)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        own = design.plan.workers or 1
        return _with_workers(design, [factor * own for factor in WORKER_FACTORS])


class InputCosts(CostModel):
    """The cost of input, divided into computing batches and waiting for storage."""

    part: ClassVar[Literal[0, 1]] = 0  # of ``CpuAndStorage``: the one that counts

    @property
    def trials(self) -> tuple[Trial, ...]:
        design = self.design
        if design.devices == 1:
            return ()
        if design.is_one_process_script:
            on_n = (_real_replicas(design), *THREADS.costs(design).trials)
        else:
            on_n = _real_and_replayed(design).trials
        return (*on_n, *self.one_device_trials)

    @property
    def fraction(self) -> float:
        """The part of the cost that counts: without what only the first epoch pays."""
        return 1 - self.design.facts.cached_input_fraction

    def lost_ms(self, view: MetricView) -> Samples:
        return self.fraction * self._multi_device_cpu_and_storage_ms(view)[self.part]

    def one_device_ms(self, view: MetricView) -> Samples:
        return self.fraction * self.one_device_cpu_and_storage_ms(view)[self.part]

    def total_ms(self, view: MetricView) -> Samples:
        return self.fraction * self._whole_ms(view)

    def _whole_ms(self, view: MetricView) -> Samples:
        # With the wait for the first batch of every epoch. On N devices, what replayed input saves
        # them together, less the part of storage.
        design, first = self.design, self._first_batch_ms(view)[self.part]
        if self.part or design.is_one_process_script or design.devices == 1:
            return super().total_ms(view) / self.fraction + first
        oversubscription_ms = THREADS.costs(design).oversubscription_ms(view)
        saved = _real_and_replayed(design).cost_ms(view) - oversubscription_ms
        _, more = self._multi_device_cpu_and_storage_ms(view)
        _, single = self.one_device_cpu_and_storage_ms(view)
        return np.maximum(0.0, saved - (more + single)) + first

    def components(self, view: MetricView) -> dict[str, Samples]:
        design, threads = self.design, THREADS.costs(self.design)
        alone = replicas(design, "real")
        if self.part or design.is_one_process_script or not view.has(alone, *threads.trials):
            return {}
        if design.facts.cached_input_fraction:
            return {}
        contention = view.reference_step(alone) - view.step(design.one_device("real"))
        contention -= threads.lost_ms(view)
        return {
            "loaders of all ranks share the host": contention,
            "waiting for the slowest loader": self.lost_ms(view) - contention,
        }

    def one_device_cpu_and_storage_ms(self, view: MetricView) -> CpuAndStorage:
        """Return the loss of one device."""
        (single,) = self.one_device_contrasts
        whole = single.cost_ms(view)
        waiting = _storage_ms(self.design, view, single.trial, whole)
        return whole - waiting, waiting

    def _multi_device_cpu_and_storage_ms(self, view: MetricView) -> CpuAndStorage:
        """Return the extra loss of N devices."""
        design, whole = self.design, self._multi_device_ms(view)
        full = with_expandable_segments(design, design.actual())
        on_n = _real_replicas(design) if design.is_one_process_script else full
        (single,) = self.one_device_contrasts
        one_ms = single.cost_ms(view)
        more = _storage_ms(design, view, on_n, whole + one_ms)
        more = more - _storage_ms(design, view, single.trial, one_ms)
        return whole - more, more

    def _multi_device_ms(self, view: MetricView) -> Samples:
        """Return the extra loss of N devices.

        Once trials with the real input show what other causes lose, it is the rest of the loss:
        input may hide a part of them.
        """
        design, threads = self.design, THREADS.costs(self.design)
        real, _ = self.one_device_trials
        if design.is_one_process_script:
            more = view.reference_step(_real_replicas(design)) - view.step(real)
            return more - threads.lost_ms(view)
        full = with_expandable_segments(design, design.actual())
        hidden = (one for one in HIDDEN_CAUSES if one.not_applicable_reason(design) is None)
        others = [one.costs(design) for one in hidden]
        computing, waiting = self.one_device_cpu_and_storage_ms(view)
        added = _real_and_replayed(design).cost_ms(view) - computing - waiting
        added = added - threads.oversubscription_ms(view)
        known = view.has(full, *(trial for one in others for trial in one.trials))
        exposed = view.has(*real_input_trials(design))
        decided = exposed or (view.final and has_input(design, view))
        if design.uses_one_process or not known or not decided:
            return added
        lost = view.step(full) - view.step(real)
        rest = lost - sum(one.lost_ms(view) for one in others)
        return rest if exposed else np.where(is_input_bound(design, view), rest, added)

    def _first_batch_ms(self, view: MetricView) -> CpuAndStorage:
        """Return the wait of N devices for first batches.

        A worker makes the first batch as any other, with the same share of waiting.
        """
        full = self.design.actual()
        if not EPOCH_BOUNDARY.costs(self.design).has_epoch_gaps(view):
            return 0.0, 0.0
        first = view.first_batch_wait(full)
        loading, waiting = view.loading_and_waiting(full)
        read = first * np.minimum(1.0, ratio(waiting, loading))
        return first - read, read


class StorageCosts(InputCosts):
    """The part that is waiting for storage."""

    part = 1
    fraction = 1.0


class FirstEpochCosts(InputCosts):
    """The part that fills a cache: later epochs do not pay it."""

    @property
    def fraction(self) -> float:
        return self.design.facts.cached_input_fraction


class FirstEpochCause(InputCause):
    """Samples that the data set computes once and keeps. There is nothing to change."""

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if not design.facts.cached_input_fraction:
            return "a second access to a sample takes as long as the first"
        return super().not_applicable_reason(design)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        return ""

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        return {}


INPUT = InputCause("input", removal=Variant(input="replayed"), model=InputCosts)
FIRST_EPOCH = FirstEpochCause("first-epoch", model=FirstEpochCosts)
STORAGE = StorageCause("storage", model=StorageCosts)


def _with_workers(design: ExperimentDesign, counts: list[int]) -> dict[str, Trial]:
    return {
        pytorch.num_workers_setting(design.facts, count): design.actual().edit(workers=count)
        for count in counts
    }


def _other_workers(workers: int, enough: int) -> list[int]:
    """Return the numbers of workers to try, the likely one first; ``enough`` keep up with the step."""
    if workers == 0:
        return list(dict.fromkeys((enough, 2)))
    more, fewer = max(enough, 2 * workers), workers // 2
    likely = (more, fewer) if enough > workers else (fewer, more)
    return [count for count in likely if count]


def _sufficient_workers(design: ExperimentDesign) -> int:
    """Return how many workers keep up with the rest of the step, as the probe run shows it.

    At most those for which a GPU has cores. On CPU devices, workers have no cores of their own. As many
    as now, and at least 1, where the loader was not observed.
    """
    plan, fetches, step_ms = design.plan, design.facts.fetches, design.step_ms
    workers, cores = plan.workers or 0, plan.cores_per_device or 1
    on_gpu = plan.device == "cuda"
    if fetches is None or not (fetches.batches and fetches.seconds and step_ms and on_gpu):
        return max(1, workers)
    of_one_ms = loading_ms_per_step(plan, fetches.batches, fetches.seconds) * max(1, workers)
    rest_ms = step_ms - (design.facts.input_wait_ms if workers else of_one_ms)
    return min(cores, math.ceil(of_one_ms / max(rest_ms, of_one_ms / cores)))


def _storage_ms(
    design: ExperimentDesign, view: MetricView, trial: Trial, exposed_ms: Samples
) -> Samples:
    """Return the part of ``exposed_ms``, the cost of input, that is waiting and not computing.

    If both together exceed the cost, the larger one counts in full: without the smaller one, as
    much would be lost. If the cost exceeds both and the training process makes its batches itself,
    it is divided in proportion: sleeping threads also wake late and find cold caches.
    """
    if design.facts.fetches is None or design.facts.batch_function is not None:
        return 0.0
    loading, waiting = view.loading_and_waiting(trial)
    computing, exposed_ms = loading - waiting, np.maximum(0.0, exposed_ms)
    beyond_computing = np.maximum(0.0, exposed_ms - computing)
    shown = np.minimum(np.where(waiting < computing, beyond_computing, exposed_ms), waiting)
    if design.plan.workers:
        return shown
    in_proportion = exposed_ms * ratio(waiting, loading)
    return np.where((exposed_ms > loading) & (loading > 0), in_proportion, shown)


def real_input_trials(design: ExperimentDesign) -> tuple[Trial, ...]:
    """Return the trials with real input between one device and N, for designs that lose to input."""
    if design.uses_one_process:
        return ()
    alone = replicas(design, "real")
    if design.facts.uses_fsdp:
        return (alone,)
    return (alone, no_allreduce(design, "real"), barrier_only(design, "real"))


HIDDEN_CAUSES: tuple[Cause, ...] = (THREADS, IMBALANCE, SYNCHRONIZATION, LINK, NETWORK, COPIES)
"""The causes whose costs slow input may hide."""


def _real_and_replayed(design: ExperimentDesign) -> Contrast:
    real, replayed = one_allreduce(design), one_allreduce(design, "replayed")
    return without_retries(design, real, replayed)


def _real_replicas(design: ExperimentDesign) -> Trial:
    return with_expandable_segments(design, replicas(design, "real"))
