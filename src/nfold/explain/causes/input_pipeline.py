"""C13: copies from host to device. Batches replayed from the host against resident ones."""

from __future__ import annotations

import math
from typing import ClassVar

from nfold.core.input_rates import host_decodes_for_gpus
from nfold.core.variant import Variant
from nfold.explain.advice import pytorch
from nfold.explain.causes.bandwidth import LinkCause, NetworkCause
from nfold.explain.causes.cause import Cause, cached_per_view, is_input_bound
from nfold.explain.causes.epoch_boundary import EpochBoundaryCause
from nfold.explain.causes.host_processes import ThreadsCause
from nfold.explain.causes.synchronization import SynchronizationCause
from nfold.explain.causes.work_division import ImbalanceCause
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.estimate.bootstrap import MetricView
from nfold.explain.metrics import loading_ms_per_step

CANNOT_REPLAY_INPUT = (
    "neither a DataLoader nor a function made the batches, so none can be given again"
)


class CopiesCause(Cause):
    """Copies that compute does not hide."""

    id: ClassVar[str] = "copies"
    occupies_device: ClassVar[bool] = True

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if design.plan.device != "cuda":
            return "CPU devices work in the host's memory"
        if not design.can_replay_input:
            return CANNOT_REPLAY_INPUT
        if design.batch_function is not None and design.batch_function.on_device:
            return f"{design.batch_function.call_text} makes a batch and moves it: what both cost is input"
        return "the data are on the device" if design.plan.input == "resident" else None

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        if design.uses_one_process and design.profile is not None:
            return ()
        on_n = (design.one_allreduce(design.host_input), design.one_allreduce("resident"))
        return (*on_n, *self.one_device_trials(design))

    @cached_per_view
    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        on_n = view.step(design.one_allreduce(design.host_input)) - view.step(
            design.one_allreduce("resident")
        )
        return on_n - self.one_device_ms(design, view)

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        return (design.one_device(design.host_input), design.one_device("resident"))

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        return view.step(design.one_device(design.host_input)) - view.step(
            design.one_device("resident")
        )

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is not None:
            return pytorch.use_pinned_copies(design.profile)
        if design.is_operation:
            return "keep images and results on the devices between calls, or compute more on each"
        return "keep the data on the device: --input resident"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        if design.profile is not None or design.is_operation:
            return {}
        plan = {"input": "resident", "augment": "device", "workers": 0}
        return {"--input resident": design.with_plan(**plan)}


class InputCause(Cause):
    """Loading, decoding and augmenting on the host; also loaders that crowd each other out."""

    id: ClassVar[str] = "input"
    removal: ClassVar[Variant] = Variant(input="replayed")

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if not design.can_replay_input:
            return CANNOT_REPLAY_INPUT
        return "the data are on the device" if design.plan.input == "resident" else None

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        """Both ends of the ladder, with real and with replayed input.

        Of a script whose allocator tries again, without that: it may hide what its input costs.
        """
        if _is_one_process_script(design):
            return (
                _real_replicas(design),
                *ThreadsCause().trials(design),
                *self.one_device_trials(design),
            )
        return (*_real_and_replayed(design), *self.one_device_trials(design))

    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        return self.cpu_and_storage_ms(design, view)[0]

    @cached_per_view
    def cpu_and_storage_ms(self, design: ExperimentDesign, view: MetricView) -> tuple[float, float]:
        """What N devices lose more than one: to computing batches, and to waiting for a disk."""
        whole = self._input_ms(design, view)
        on_n = (
            _real_replicas(design)
            if _is_one_process_script(design)
            else design.with_expandable_segments(design.actual())
        )
        alone, replayed = self.one_device_trials(design)
        single = view.step(alone) - view.step(replayed)
        more = _storage_ms(design, view, on_n, whole + single) - _storage_ms(
            design, view, alone, single
        )
        return whole - more, more

    def _input_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """Of N devices more than of one; with the real ladder, all that it adds to the bare.

        What other causes lose is then less where the input hides it.
        """
        if _is_one_process_script(design):
            more = view.reference_step(_real_replicas(design)) - view.step(
                self.one_device_trials(design)[0]
            )
            return more - ThreadsCause().lost_ms(design, view)
        told = view.has(*real_input_trials(design)) or (view.final and is_input_bound(design, view))
        full = design.with_expandable_segments(design.actual())
        if design.uses_one_process or not (
            told and view.has(full) and _other_causes_measured(design, view)
        ):
            on_n = _multi_device_input_ms(design, view)
            crowded = ThreadsCause().oversubscription_input_ms(design, view)
            return on_n - sum(self.one_device_cpu_and_storage_ms(design, view)) - crowded
        rest = view.step(full) - view.step(self.one_device_trials(design)[0])
        return rest - sum(cause.lost_ms(design, view) for cause in _other_causes(design))

    def total_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        """With what every pass over the data waits for its first batch: that is made as well.

        What goes with the input of N devices that work together, less storage's part: what comes to
        light then is another cause's, and what loaders do to other causes goes with them.
        """
        if _is_one_process_script(design) or design.devices == 1:
            return super().total_ms(design, view) + self.first_batch_ms(design, view)[0]
        gone = _multi_device_input_ms(design, view) - ThreadsCause().oversubscription_input_ms(
            design, view
        )
        gone -= (
            self.cpu_and_storage_ms(design, view)[1]
            + self.one_device_cpu_and_storage_ms(design, view)[1]
        )
        return max(0.0, gone) + self.first_batch_ms(design, view)[0]

    @cached_per_view
    def first_batch_ms(self, design: ExperimentDesign, view: MetricView) -> tuple[float, float]:
        """Of a step on N devices what passes wait for their first batches: computed, and read.

        One such batch is made by one worker, as any other is: in that time it computes and waits.
        """
        full = design.actual()
        if not EpochBoundaryCause().has_epoch_gaps(design, view):
            return 0.0, 0.0
        first = view.first_batch_wait(full)
        loading, waiting = view.loading_and_waiting(full)
        read = first * min(1.0, waiting / loading) if loading > 0 else 0.0
        return first - read, read

    def components(self, design: ExperimentDesign, view: MetricView) -> dict[str, float]:
        copies = design.replicas("real")
        if _is_one_process_script(design) or not view.has(copies, *ThreadsCause().trials(design)):
            return {}
        crowd = view.reference_step(copies) - view.step(design.one_device("real"))
        crowd -= ThreadsCause().lost_ms(design, view)
        return {
            "loaders of all ranks share the host": crowd,
            "waiting for whichever loader is late": self.lost_ms(design, view) - crowd,
        }

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        real, replayed = design.one_device("real"), design.one_device("replayed")
        return (design.with_expandable_segments(real), design.with_expandable_segments(replayed))

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        return self.one_device_cpu_and_storage_ms(design, view)[0]

    def one_device_cpu_and_storage_ms(
        self, design: ExperimentDesign, view: MetricView
    ) -> tuple[float, float]:
        """What one device loses: to computing batches, and to waiting for a disk."""
        real, replayed = self.one_device_trials(design)
        whole = view.step(real) - view.step(replayed)
        waiting = _storage_ms(design, view, real, whole)
        return whole - waiting, waiting

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        if design.profile is not None:
            numbers = [rung.plan.workers or 0 for rung in self.tried_fixes(design, view)]
            return pytorch.speed_up_input(design.profile, max(_first_workers(design)), numbers)
        if not design.plan.workers:
            return "let worker processes load (--workers 2), or --input resident"
        *most, last = self.fixes(design)
        return f"{', '.join(most)} or {last} (measure them)"

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        plan = design.plan
        workers = plan.workers or 0
        if design.batch_function is not None:
            return {}
        others = sorted({workers // 2, 2 * workers} - {0}) or _first_workers(design)
        if design.profile is not None:
            seen = design.profile
            return {
                pytorch.num_workers_setting(seen, other): design.with_plan(workers=other)
                for other in others
            }
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


def _first_workers(design: ExperimentDesign) -> list[int]:
    """For a script that has none: as many as keep up with the rest of its step, and then two.

    On CPU devices they have no cores of their own.
    """
    seen, step_ms, cores = design.profile, design.step_ms, design.plan.cores_per_device or 1
    if seen is None or seen.fetches is None or not (seen.fetches.batches and step_ms):
        return [1, 2]
    making_ms = loading_ms_per_step(design.plan, seen.fetches.batches, seen.fetches.seconds)
    rest_ms = max(step_ms - making_ms, making_ms / cores)
    enough = min(cores, math.ceil(making_ms / rest_ms)) if design.plan.device == "cuda" else 1
    return list(dict.fromkeys((enough, 2))) if enough > 1 else [1, 2]


def _multi_device_input_ms(design: ExperimentDesign, view: MetricView) -> float:
    real, replayed = _real_and_replayed(design)
    return view.step(real) - view.step(replayed)


def _storage_ms(
    design: ExperimentDesign, view: MetricView, trial: Trial, exposed_ms: float
) -> float:
    """Of what the input costs a step of a rung, the part that no computing explains.

    Where computing and waiting are together more than is exposed, the larger one counts whole:
    without the smaller one, as much would be lost. Where more is exposed and the process that
    trains makes its batches itself, the rest goes with both: while it sleeps, its threads fall
    asleep and its caches cool, and a sleep ends late.
    """
    if (
        design.profile is None
        or design.profile.fetches is None
        or design.batch_function is not None
    ):
        return 0.0
    loading, waiting = view.loading_and_waiting(trial)
    computing, exposed_ms = loading - waiting, max(0.0, exposed_ms)
    if exposed_ms > loading > 0 and not design.plan.workers:
        return exposed_ms * waiting / loading
    if waiting < computing:
        exposed_ms = max(0.0, exposed_ms - computing)
    return min(exposed_ms, waiting)


def real_input_trials(design: ExperimentDesign) -> tuple[Trial, ...]:
    """The rungs between both ends with real input: asked for where input was found."""
    if design.uses_one_process:
        return ()
    if design.sharded:
        return (design.replicas("real"),)
    return (design.replicas("real"), design.no_allreduce("real"), design.barrier_only("real"))


def _other_causes_measured(design: ExperimentDesign, view: MetricView) -> bool:
    return all(view.has(*cause.trials(design)) for cause in _other_causes(design))


def _other_causes(design: ExperimentDesign) -> list[Cause]:
    found: list[Cause] = [
        ThreadsCause(),
        ImbalanceCause(),
        SynchronizationCause(),
        LinkCause(),
        NetworkCause(),
        CopiesCause(),
    ]
    return [cause for cause in found if cause.not_applicable_reason(design) is None]


def _is_one_process_script(design: ExperimentDesign) -> bool:
    return design.uses_one_process and design.profile is not None


def _real_and_replayed(design: ExperimentDesign) -> tuple[Trial, Trial]:
    return (
        design.with_expandable_segments(design.one_allreduce()),
        design.with_expandable_segments(design.one_allreduce("replayed")),
    )


def _real_replicas(design: ExperimentDesign) -> Trial:
    return design.with_expandable_segments(design.replicas("real"))


# C6: waiting for a disk or a network. Of what slow input costs, the part in which nobody computes.
#
# The input's cost is proven by an experiment (real input against replayed). Its division is watched
# in the same runs, in every process that makes batches: how long they compute or want a core, and
# how long they sleep. Made side by side, a step's batches take that time over the number of workers.

INPUT_CAUSE = InputCause()
WORKER_FACTORS = (2, 4)
"""Times as many as the script has."""


class StorageCause(Cause):
    """A slow disk or a remote one: the part of the input that waits."""

    id: ClassVar[str] = "storage"

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        if design.profile is None:
            return "the data are in memory before the first step"
        if not design.can_replay_input:
            return CANNOT_REPLAY_INPUT
        if design.batch_function is not None:
            return (
                f"waiting in {design.batch_function.call_text} was not watched: it is part of input"
            )
        if design.profile.fetches is None:
            return "the processes that make batches could not be watched (workers by spawn)"
        return None

    def trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        return INPUT_CAUSE.trials(design)

    def lost_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        return INPUT_CAUSE.cpu_and_storage_ms(design, view)[1]

    def total_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        return super().total_ms(design, view) + INPUT_CAUSE.first_batch_ms(design, view)[1]

    def one_device_trials(self, design: ExperimentDesign) -> tuple[Trial, ...]:
        return INPUT_CAUSE.one_device_trials(design)

    def one_device_ms(self, design: ExperimentDesign, view: MetricView) -> float:
        return INPUT_CAUSE.one_device_cpu_and_storage_ms(design, view)[1]

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        assert design.profile is not None
        return pytorch.speed_up_reads(design.profile)

    def fixes(self, design: ExperimentDesign) -> dict[str, Trial]:
        assert design.profile is not None
        own = design.plan.workers or 1
        counts = [factor * own for factor in WORKER_FACTORS]
        return {
            pytorch.num_workers_setting(design.profile, count): design.with_plan(workers=count)
            for count in counts
        }
