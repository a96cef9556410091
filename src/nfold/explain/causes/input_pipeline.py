"""The input pipeline: copies to the device, making batches on the host, reading from storage."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np

from nfold.core.input_rates import host_decodes_for_gpus
from nfold.core.variant import Variant
from nfold.explain.advice import pytorch
from nfold.explain.causes.cause import (
    Cause,
    Contrast,
    has_input,
    is_input_bound,
    without_retries,
)
from nfold.explain.causes.collectives import LinkCause, NetworkCause, SynchronizationCause
from nfold.explain.causes.epoch_boundary import EPOCH_BOUNDARY
from nfold.explain.causes.host_processes import THREADS
from nfold.explain.causes.work_division import ImbalanceCause
from nfold.explain.design import ExperimentDesign, Trial
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

    id = "copies"
    occupies_device = True

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if design.plan.device != "cuda":
            return "CPU devices use host memory"
        if not design.can_replay_input:
            return CANNOT_REPLAY_INPUT
        if design.batch_function is not None and design.batch_function.on_device:
            return (
                f"{design.batch_function.call_text} makes a batch and copies it: both are in input"
            )
        return "the data are on the device" if design.plan.input == "resident" else None

    def contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        if design.is_one_process_script:
            return ()
        host, resident = design.one_allreduce(design.host_input), design.one_allreduce("resident")
        (single,) = self.one_device_contrasts(design)
        return (Contrast(host, resident, less=single),)

    def one_device_contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        return (Contrast(design.one_device(design.host_input), design.one_device("resident")),)

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is not None:
            return pytorch.use_pinned_copies(design.profile)
        if design.is_operation:
            return "keep images and results on the devices between calls, or compute more per call"
        return "keep the data on the device: --input resident"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        if design.profile is not None or design.is_operation:
            return {}
        resident = design.with_plan(input="resident", augment="device", workers=0)
        return {"--input resident": resident}


class InputCause(Cause):
    """Loading, decoding and augmenting on the host, and loaders that slow each other."""

    id = "input"
    removal = Variant(input="replayed")
    part: ClassVar[Literal[0, 1]] = 0  # of ``CpuAndStorage``

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if not design.can_replay_input:
            return CANNOT_REPLAY_INPUT
        return "the data are on the device" if design.plan.input == "resident" else None

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        if design.is_one_process_script:
            on_n = (_real_replicas(design), *THREADS.trials(design))
        else:
            on_n = _real_and_replayed(design).trials
        return (*on_n, *self.one_device_trials(design))

    def one_device_contrasts(self, design: ExperimentDesign) -> tuple[Contrast, ...]:
        real, replayed = design.one_device("real"), design.one_device("replayed")
        return (without_retries(design, real, replayed),)

    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> Samples:
        return self.cpu_and_storage_ms(design, view)[self.part]

    def cpu_and_storage_ms(self, design: ExperimentDesign, view: MetricView) -> CpuAndStorage:
        """Return the extra loss of N devices."""
        whole = self._multi_device_ms(design, view)
        full = design.with_expandable_segments(design.actual())
        on_n = _real_replicas(design) if design.is_one_process_script else full
        (single,) = self.one_device_contrasts(design)
        one_ms = single.cost_ms(view)
        more = _storage_ms(design, view, on_n, whole + one_ms) - _storage_ms(
            design, view, single.trial, one_ms
        )
        return whole - more, more

    def _multi_device_ms(self, design: ExperimentDesign, view: MetricView) -> Samples:
        """Return the extra loss of N devices.

        Once trials with the real input show what other causes lose, it is the rest of the loss:
        input may hide a part of them.
        """
        real, _ = self.one_device_trials(design)
        if design.is_one_process_script:
            more = view.reference_step(_real_replicas(design)) - view.step(real)
            return more - THREADS.lost_ms(design, view)
        full = design.with_expandable_segments(design.actual())
        others = [one for one in HIDDEN_CAUSES if one.not_applicable_reason(design) is None]
        computing, waiting = self.one_device_cpu_and_storage_ms(design, view)
        added = _real_and_replayed(design).cost_ms(view) - computing - waiting
        added = added - THREADS.oversubscription_ms(design, view)
        known = view.has(full, *(trial for c in others for trial in c.trials(design)))
        exposed = view.has(*real_input_trials(design))
        decided = exposed or (view.final and has_input(design, view))
        if design.uses_one_process or not known or not decided:
            return added
        lost = view.step(full) - view.step(real)
        rest = lost - sum(cause.lost_ms(design, view) for cause in others)
        return rest if exposed else np.where(is_input_bound(design, view), rest, added)

    def total_ms(self, design: ExperimentDesign, view: MetricView) -> Samples:
        # With the wait for the first batch of every epoch. On N devices, what replayed input saves
        # them together, less the part of storage.
        first = self.first_batch_ms(design, view)[self.part]
        if self.part or design.is_one_process_script or design.devices == 1:
            return super().total_ms(design, view) + first
        saved = _real_and_replayed(design).cost_ms(view) - THREADS.oversubscription_ms(design, view)
        saved -= (
            self.cpu_and_storage_ms(design, view)[1]
            + self.one_device_cpu_and_storage_ms(design, view)[1]
        )
        return np.maximum(0.0, saved) + first

    def first_batch_ms(self, design: ExperimentDesign, view: MetricView) -> CpuAndStorage:
        """Return the wait of N devices for first batches.

        A worker makes the first batch as any other, with the same share of waiting.
        """
        full = design.actual()
        if not EPOCH_BOUNDARY.has_epoch_gaps(design, view):
            return 0.0, 0.0
        first = view.first_batch_wait(full)
        loading, waiting = view.loading_and_waiting(full)
        read = first * np.minimum(1.0, ratio(waiting, loading))
        return first - read, read

    def components(self, design: ExperimentDesign, view: MetricView) -> dict[str, Samples]:
        replicas = design.replicas("real")
        if design.is_one_process_script or not view.has(replicas, *THREADS.trials(design)):
            return {}
        contention = view.reference_step(replicas) - view.step(design.one_device("real"))
        contention -= THREADS.lost_ms(design, view)
        return {
            "loaders of all ranks share the host": contention,
            "waiting for the slowest loader": self.lost_ms(design, view) - contention,
        }

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> Samples:
        return self.one_device_cpu_and_storage_ms(design, view)[self.part]

    def one_device_cpu_and_storage_ms(
        self, design: ExperimentDesign, view: MetricView
    ) -> CpuAndStorage:
        """Return the loss of one device."""
        (single,) = self.one_device_contrasts(design)
        whole = single.cost_ms(view)
        waiting = _storage_ms(design, view, single.trial, whole)
        return whole - waiting, waiting

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is not None:
            tried = [trial.plan.workers or 0 for trial in self.tried_fixes(design, view)]
            return pytorch.speed_up_input(design.profile, max(_first_workers(design)), tried)
        if not design.plan.workers:
            return "load in worker processes (--workers 2), or --input resident"
        *most, last = self.fixes(design)
        return f"{', '.join(most)} or {last} (measure them)"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        plan = design.plan
        workers = plan.workers or 0
        if design.batch_function is not None:
            return {}
        others = sorted({workers // 2, 2 * workers} - {0}) or _first_workers(design)
        if design.profile is not None:
            return _with_workers(design, others)
        found = {}
        if host_decodes_for_gpus(plan) and plan.cache == "off":
            on_device = design.with_plan(decode="device", augment="device")
            found["--decode device --augment device"] = on_device
        found["--input resident"] = design.with_plan(input="resident", augment="device", workers=0)
        if plan.augment == "cpu":
            found["--augment device"] = design.with_plan(augment="device")
        for other in others[: 2 if workers else 1]:
            found[f"--workers {other}"] = design.with_plan(workers=other)
        return found


class StorageCause(InputCause):
    """Waiting for a disk or a network: the part of the cost of input in which nobody computes.

    The cost of input comes from real against replayed batches. In the same trials, nfold measures
    how long every process that makes batches computes (or waits for a core) and how long it sleeps.
    """

    id = "storage"
    removal = Variant()
    part = 1

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if design.profile is None:
            return "the data are in memory before the first step"
        if not design.can_replay_input:
            return CANNOT_REPLAY_INPUT
        if design.batch_function is not None:
            return f"waiting in {design.batch_function.call_text} is not measured: it is in input"
        if design.profile.fetches is None:
            return "the processes that make batches are not measured (spawned workers)"
        return None

    def components(self, design: ExperimentDesign, view: MetricView) -> dict[str, Samples]:
        return {}

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        return pytorch.speed_up_reads(design.facts)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        own = design.plan.workers or 1
        return _with_workers(design, [factor * own for factor in WORKER_FACTORS])


def _with_workers(design: ExperimentDesign, counts: list[int]) -> dict[str, Trial]:
    return {
        pytorch.num_workers_setting(design.facts, count): design.with_plan(workers=count)
        for count in counts
    }


def _first_workers(design: ExperimentDesign) -> list[int]:
    """Return worker counts for a script without workers: enough for its step, and two.

    On CPU devices, workers have no cores of their own.
    """
    fetches, step_ms, cores = (
        design.facts.fetches,
        design.step_ms,
        design.plan.cores_per_device or 1,
    )
    if fetches is None or not (fetches.batches and step_ms):
        return [1, 2]
    loading_ms = loading_ms_per_step(design.plan, fetches.batches, fetches.seconds)
    compute_ms = max(step_ms - loading_ms, loading_ms / cores)
    enough = min(cores, math.ceil(loading_ms / compute_ms)) if design.plan.device == "cuda" else 1
    return list(dict.fromkeys((enough, 2))) if enough > 1 else [1, 2]


def _storage_ms(
    design: ExperimentDesign, view: MetricView, trial: Trial, exposed_ms: Samples
) -> Samples:
    """Return the part of ``exposed_ms``, the cost of input, that is waiting and not computing.

    If both together exceed the cost, the larger one counts in full: without the smaller one, as
    much would be lost. If the cost exceeds both and the training process makes its batches itself,
    it is divided in proportion: sleeping threads also wake late and find cold caches.
    """
    if design.facts.fetches is None or design.batch_function is not None:
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
    if design.sharded:
        return (design.replicas("real"),)
    return (design.replicas("real"), design.no_allreduce("real"), design.barrier_only("real"))


HIDDEN_CAUSES: tuple[Cause, ...] = (
    THREADS,
    ImbalanceCause(),
    SynchronizationCause(),
    LinkCause(),
    NetworkCause(),
    CopiesCause(),
)
"""The causes whose costs slow input may hide."""


def _real_and_replayed(design: ExperimentDesign) -> Contrast:
    real, replayed = design.one_allreduce(), design.one_allreduce("replayed")
    return without_retries(design, real, replayed)


def _real_replicas(design: ExperimentDesign) -> Trial:
    return design.with_expandable_segments(design.replicas("real"))
