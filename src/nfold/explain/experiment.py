"""The experiment: which rungs are run, in which order, how often, until the time is over.

What a first look has seen happen comes first, before what shares process trees with both ends. On
one device the fixes of what takes more than half of its step follow at once. Then rounds over
all rungs, each in a random order of its own, so that drift meets all alike. What the first round
shows asks for further rungs (fixes, causes taken away together, other batches), which come first in
the next; later rounds repeat the rungs of the row whose interval is widest. On a host that is now
faster and now slower another process tree of the real run comes before them.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from nfold.core.errors import RunFailure, UsageError
from nfold.core.machine import Machine
from nfold.core.measurement import Measurement
from nfold.core.plan import LONG_STEP_S, WARMUP_STEPS, Plan
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile
from nfold.core.stats import median
from nfold.core.variant import Variant
from nfold.explain import planner
from nfold.explain.advice.pytorch import gap_locations, with_gap_locations
from nfold.explain.design import ExperimentDesign, Scaling, Trial, prefetched_batches
from nfold.explain.metrics import compute_metrics, gpu_clock_rates, loading_ms_per_step
from nfold.explain.planner import (
    batch_size_trials,
    epoch_boundary_trials,
    interleaved_seconds,
    with_original_batch,
    with_run_length,
)
from nfold.explain.trials import (
    LARGER_BUDGET_HINT,
    TrialResults,
    TrialRunner,
    failure_reason,
    failure_text,
    hit_time_limit,
)
from nfold.launch.launch_spec import StopRequest
from nfold.launch.verdict import check_same_samples

PILOT_STEPS = 30
MAX_ROUNDS = 6
OVERRUN_FACTOR = 1.2
"""Of the time that is left: what nobody has measured yet may take a little more."""
MAX_PROBE_S = 300.0
"""Of a first look, with all that is before a script's first step; or twice the time budget."""


class ExperimentEvents:
    """What an experiment tells while it goes on. This base listens to nothing."""

    def started(self, trials: Sequence[Trial], number: int, remaining_s: float) -> None:
        """A run of these begins; ``number`` is its round."""

    def finished(
        self, trials: Sequence[Trial], number: int, found: Sequence[Measurement], remaining_s: float
    ) -> None:
        """It has ended, well or not, or they were measured before."""


@dataclass
class TimeBudget:
    """The time budget, in seconds."""

    budget_s: float
    now: Callable[[], float] = time.monotonic
    started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.now()

    @property
    def remaining_s(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self.budget_s - (self.now() - self.started_at))


@dataclass
class Experiment:
    """One explanation while its runs go on."""

    runner: TrialRunner
    time_budget: TimeBudget
    events: ExperimentEvents
    stop: StopRequest = field(default_factory=StopRequest)
    results: TrialResults = field(default_factory=TrialResults)
    _not_interleaved: set[Trial] = field(default_factory=set)
    _retried: set[Trial] = field(default_factory=set)
    _interleaved_failures: dict[Trial, str] = field(default_factory=dict)
    _finds_unused_parameters: bool = False
    _step_s: float = 0.0

    def run(self, design: ExperimentDesign) -> ExperimentDesign:
        """Measure; the ladder with the length of its runs, what a script does between its steps
        and the clocks of its devices.

        Raises RunFailure without a result.
        """
        if design.profile is not None:
            self.runner = self.runner.with_profile(design.profile)
        design = self._with_run_length(design)
        self._finds_unused_parameters = (
            design.profile is not None and design.profile.find_unused_parameters
        )
        wanted, evident = list(planner.required(design)), list(planner.observed_in_probe(design))
        # What a first look has seen happen does not wait for the turns of all the others.
        self._run_required(design, (design.actual(), design.baseline), evident or wanted)
        fixes = planner.dominant_fixes(design, self.results)
        self._run_round(self._affordable(fixes), 0, fixes)
        epochs = epoch_boundary_trials(
            design, self.results, self.runner.epoch_steps, self.time_budget.budget_s
        )
        ahead = [*evident, *batch_size_trials(design)]
        first = [*ahead, *wanted, *epochs]
        failing = functools.partial(
            with_original_batch, design, self.results, self._interleaved_failures
        )
        self._run_round(self._affordable(first), 0, ahead, until=failing)
        own = failing()
        if own is not None:
            self.results = TrialResults()
            return self.run(own)
        self._run_round(first, 0)
        for number in range(1, MAX_ROUNDS):
            follow_ups = planner.follow_ups(design, self.results)
            rungs = self._next_trials(design, [*first, *follow_ups], number)
            asked = dict.fromkeys([*follow_ups, *rungs])
            new = [rung for rung in asked if not self.results.was_tried(rung)]
            if number == 1 and "unsteady" in self.results.unstable_steps():
                new = [design.actual(), *new]
            if self.stop or not (rungs or new) or not self._run_round([*new, *rungs], number, new):
                break
        found = gpu_clock_rates(self.results.measurements(), design.devices)
        return dataclasses.replace(
            with_gap_locations(design, self.results.measurements()), clock_rates=found
        )

    def run_probe(self, trial: Trial, *, force: bool = False) -> Measurement:
        """One run that is no part of the ladder, whatever time is left; it may fail."""
        found = None if force else self.runner.stored(trial, 0)
        if found is None:
            self.events.started([trial], 0, self.time_budget.remaining_s)
            limit_s = max(MAX_PROBE_S, 2 * self.time_budget.budget_s)
            found = self.runner.measure(trial, 0, limit_s)
        self.events.finished([trial], 0, [found], self.time_budget.remaining_s)
        return found

    def _with_run_length(self, design: ExperimentDesign) -> ExperimentDesign:
        step_s = self._step_s = (design.step_ms or self._pilot_step_ms(design)) / 1e3
        by_itself = Trial(plan=design.plan.edit(steps=1, epochs=None))
        return with_run_length(
            design, step_s, interleaved=self.runner.shared_trial(by_itself) is not None
        )

    def _pilot_step_ms(self, design: ExperimentDesign) -> float:
        pilot = Trial(plan=design.plan.edit(steps=PILOT_STEPS, epochs=None))
        self._run_required(design, [pilot])
        (found,) = self.results.runs.pop(pilot).values()
        return compute_metrics(found, ranks_synchronize=True)["step"]

    def _run_round(
        self,
        trials: Iterable[Trial],
        number: int,
        first: Collection[Trial] = (),
        until: Callable[[], object] = lambda: None,
    ) -> bool:
        """Every rung once, as long as ``until`` says nothing; whether any was run or known.

        What comes ``first``, with all that shares its process trees, is in the order in which it
        is wanted, because time may be over soon. The rest is in a random one.
        """
        groups = self._interleaved_groups(trials)
        random.Random(number).shuffle(groups)
        ahead = (rung for rung in dict.fromkeys(first) if not self.results.is_done(rung, number))
        wanted = {rung: place for place, rung in enumerate(ahead)}
        groups.sort(key=lambda group: min(wanted.get(rung, len(wanted)) for rung in group))
        found = [self._run_group(group, number) for group in groups if not until()]
        return any(found)

    def _interleaved_groups(self, trials: Iterable[Trial]) -> list[list[Trial]]:
        """Rungs that share a process tree, in the order in which the first of each is wanted.

        Where a wrapper looks for unused parameters, ranks tell each other which in every backward:
        without an exchange they must do so from the start.
        """
        found: dict[object, list[Trial]] = {}
        for rung in dict.fromkeys(trials):
            tied = self._finds_unused_parameters and rung.variant.exchange == "none"
            shared = (
                None if tied or rung in self._not_interleaved else self.runner.shared_trial(rung)
            )
            found.setdefault((shared is None, shared or rung), []).append(rung)
        return list(found.values())

    def _affordable(self, trials: Iterable[Trial]) -> list[Trial]:
        left_s, fitting = self.time_budget.remaining_s, []
        for group in self._interleaved_groups(r for r in trials if not self.results.is_done(r, 0)):
            known = all(self.runner.stored(rung, 0) for rung in group)
            left_s -= 0.0 if known else self.results.expected_seconds(group)
            if left_s >= 0:
                fitting += group
        return fitting

    def _run_required(
        self, design: ExperimentDesign, required: Iterable[Trial], optional: Sequence[Trial] = ()
    ) -> None:
        """First runs without which nothing can be said, whatever time is left.

        What is wanted and shares their process trees is measured with them, unless steps are so
        long that there is no time for so many. One that fails is tried once more: a script that
        could be looked at may have failed by chance.
        """
        for rung in required:
            while rung not in self.results.runs:
                if rung in self.results.reasons:
                    reason = self.results.reasons.pop(rung)
                    if self.stop or rung in self._retried:
                        raise RunFailure(f"{rung}: {reason}; nothing can be explained")
                    self._retried.add(rung)
                (group, *_) = self._interleaved_groups([rung, *optional])
                asked = [one for one in group if self._needs_run(one, 0)]
                if rung in asked:
                    asked = asked if self._is_affordable(design, asked) else [rung]
                    self.events.started(asked, 0, self.time_budget.remaining_s)
                    self._record(asked, 0, self._run(asked, 0))

    def _is_affordable(self, design: ExperimentDesign, asked: Sequence[Trial]) -> bool:
        short = self._step_s <= LONG_STEP_S
        return (
            short
            or interleaved_seconds(design, asked, self._step_s) <= self.time_budget.remaining_s
        )

    def _run_group(self, group: Sequence[Trial], number: int) -> bool:
        """One run of rungs that share it, unless they cannot be, are there, or the time is over.

        It is given what is left, and once more what a run takes: what a script does between its
        passes may take any time. Returns whether any of them is measured.
        """
        asked = [rung for rung in group if self._needs_run(rung, number)]
        seconds, new = self.results.expected_seconds(asked), not self.results.has(asked[:1])
        if (
            asked
            and not self.stop
            and seconds <= (OVERRUN_FACTOR if new else 1) * self.time_budget.remaining_s
        ):
            self.events.started(asked, number, self.time_budget.remaining_s)
            limit_s = self.time_budget.remaining_s + seconds
            self._record(asked, number, self._run(asked, number, limit_s))
        return any(number in self.results.runs.get(rung, {}) for rung in group)

    def _needs_run(self, trial: Trial, number: int) -> bool:
        if self.results.is_done(trial, number):
            return False
        reason = self.runner.refusal_reason(trial)
        if reason is not None:
            self.results.reasons[trial] = reason
            return False
        again = number == 0 and trial in self._retried
        found = None if again else self.runner.stored(trial, number)
        if found is not None:
            self._record([trial], number, [found])
        return found is None

    def _run(
        self, trials: Sequence[Trial], number: int, limit_s: float | None = None
    ) -> list[Measurement]:
        if len(trials) > 1:
            return self.runner.measure_interleaved(trials, number, limit_s)
        return [self.runner.measure(rung, number, limit_s) for rung in trials]

    def _record(self, trials: Sequence[Trial], number: int, found: list[Measurement]) -> None:
        """What had no turn before a run of several ended, well or not, is run by itself then.

        Where none had one, ``_failed`` says why the first had not.
        """
        self.events.finished(trials, number, found, self.time_budget.remaining_s)
        for rung, measurement in zip(trials, found, strict=True):
            ok = measurement.status == "ok"
            had_one = ok and bool(
                compute_metrics(measurement, ranks_synchronize=rung.ranks_synchronize)
            )
            if len(trials) > 1 and not had_one and (ok or not self.stop):
                self._not_interleaved.add(rung)
            else:
                self.results.add(rung, number, measurement)
        if self._not_interleaved.issuperset(trials) and found[0].status in (
            "crashed",
            "unsupported",
        ):
            self._interleaved_failures[trials[0]] = failure_reason(found[0])

    def _next_trials(
        self, design: ExperimentDesign, trials: list[Trial], number: int
    ) -> list[Trial]:
        """All that there is in the second and third round; then what the widest row needs.

        With it, all that shares its process trees: what these differ by cancels between rungs
        that were in the same ones.
        """
        if number < 3:
            return trials
        asked = planner.widest_interval(design, self.results)
        shared = {self.runner.shared_trial(rung) for rung in asked} - {None}
        return [*asked, *(rung for rung in trials if self.runner.shared_trial(rung) in shared)]


PROBE_STEPS = 40
"""Steps of a first look: by its end, what a few workers made ahead is used up."""
MODEL_PARALLEL_NAMES: dict[str, str] = {"tensor": "tensor parallel", "pipeline": "a pipeline"}
ProfileReader = Callable[[Measurement], tuple[ScriptProfile, ...]]
"""What every rank saw in a measurement; empty where that is no longer there."""


def probe_script(
    experiment: Experiment,
    devices_plan: Plan,
    scaling: Scaling | None,
    machine: Machine,
    read_profiles: ProfileReader,
) -> ExperimentDesign:
    """The ladder of a script on the devices of ``place``, as it uses them by itself.

    It is started as torchrun starts it, a process a device. Where it does not make a process
    group, or fails, it is run again as one process that sees all devices, if there are several.
    Raises RunFailure with the script's own error where neither trains.
    """
    several = devices_plan.devices != 1
    strategy = "ddp" if several else "single"
    looked = devices_plan.edit(strategy=strategy, steps=PROBE_STEPS, warmup_steps=WARMUP_STEPS)
    ranks = Trial(plan=looked, variant=Variant(profiler_steps=True))
    single = Trial(plan=looked.edit(strategy="dp"), variant=ranks.variant)
    first, seen = _run_probe(experiment, ranks, read_profiles, *((single,) if several else ()))
    if not several:
        if first.status != "ok":
            raise RunFailure(_failure_message(experiment.runner.target_name, first))
        return _design_from_probe(first, scaling or "weak", seen[0], machine)
    if first.status == "ok" and any(one.process_group for one in seen):
        if seen[0].parallel in MODEL_PARALLEL_NAMES:
            raise RunFailure(
                _model_parallel_message(
                    experiment.runner.target_name, seen[0], devices_plan.devices or 1
                )
            )
        own = dataclasses.replace(seen[0], slices_batches=_slices_batches(first, seen[0]))
        return _design_from_probe(first, scaling or "weak", own, machine)
    second, seen = _run_probe(experiment, single, read_profiles)
    failed = next((m for m in (first, second) if m.status != "ok"), None)
    if second.status != "ok" and failed is not None:
        raise RunFailure(_failure_message(experiment.runner.target_name, failed))
    made = _design_from_probe(second, scaling or _natural_scaling(seen[0]), seen[0], machine)
    why = "" if first.status == "ok" else failure_text(first)
    return dataclasses.replace(
        made, multi_process_failure=why, scaling_requested=scaling is not None
    )


def _slices_batches(found: Measurement, profile: ScriptProfile) -> bool:
    part = profile.samples_per_step / max(1, profile.world_size)
    return (
        check_same_samples(found.ranks) is not None and 0 < profile.model_samples_per_step == part
    )


def _model_parallel_message(name: str, profile: ScriptProfile, devices: int) -> str:
    return (
        f"{name} divides its model over {devices} devices ({MODEL_PARALLEL_NAMES[profile.parallel]}): they compute "
        "the same samples together, on purpose, and nfold explains work that is divided by samples"
        "; next: --devices 1, for what one device loses"
    )


def _run_probe(
    experiment: Experiment, trial: Trial, read: ProfileReader, *others: Trial
) -> tuple[Measurement, tuple[ScriptProfile, ...]]:
    """The run, and what was seen in it; one whose folder is gone is run anew.

    So is one that failed, unless another way to start the script is known to work: what it lacked
    may be there now.
    """
    stored = [experiment.runner.stored(one, 0) for one in (trial, *others)]
    works = any(one is not None and one.status == "ok" for one in stored)
    found = experiment.run_probe(trial, force=not works)
    seen = read(found)
    if found.status == "ok" and not seen:
        found = experiment.run_probe(trial, force=True)
        seen = read(found)
    return found, seen


def _failure_message(name: str, failed: Measurement) -> str:
    rank = (failed.cause.rank if failed.cause else None) or 0
    log = f" (what it printed: {failed.folder}/rank-{rank}.log in the results folder)"
    printed = log if failed.folder else ""
    cause = f"{failure_text(failed)}{_probe_hint(failed)}"
    return f"{name} {failed.status}: {cause}{printed}; nothing can be explained"


def _probe_hint(failed: Measurement) -> str:
    timed_out = failed.status in ("hung", "interrupted")
    if timed_out and failed.cause is not None and failed.cause.step == 0:
        return (
            ": it took no step of a torch optimizer; next: a script that trains, or, where it "
            "takes so long to begin, a larger --budget"
        )
    return LARGER_BUDGET_HINT if hit_time_limit(failed) else ""


def _design_from_probe(
    found: Measurement, scaling: Scaling, profile: ScriptProfile, machine: Machine
) -> ExperimentDesign:
    plan = found.plan
    each = max(profile.world_size, plan.devices or 1)
    batch = profile.global_batch_size or round((profile.samples_per_step or 1.0) * each)
    scaling, own = (
        ("weak", True) if plan.devices == 1 else (scaling, scaling == _natural_scaling(profile))
    )
    if not own:
        batch = _rescaled_batch(batch, scaling, profile, plan.devices or 1)
    workers = profile.loader.num_workers if profile.loader else None
    ahead = _queued_batches(profile.loader, profile.world_size)
    made = plan.edit(
        batch=max(1, batch),
        accumulate=profile.accumulation,
        workers=workers,
        input="loader",
        precision=profile.precision,
        layout="channels_last" if profile.channels_last else "channels_first",
        step="compiled" if profile.compiled else "eager",
        batch_norm="synchronised" if profile.synchronised_batch_norms else "device",
        warmup_steps=WARMUP_STEPS + -(-ahead // profile.accumulation),
    )
    memory = machine.gpus[0].memory_bytes if plan.device == "cuda" and machine.gpus else None
    return ExperimentDesign(
        plan=made,
        scaling=scaling,
        profile=profile,
        step_ms=_probe_step_ms(found, made, profile, ahead) if own else None,
        host_gaps_ms=_host_gaps_ms(found),
        gap_locations=gap_locations(found),
        memory_bytes=memory,
    )


def _queued_batches(loader: DataLoaderProfile | None, world_size: int) -> int:
    if loader is None:
        return 0
    ahead = prefetched_batches(loader.num_workers, loader.prefetch_factor)
    return min(ahead, world_size * (loader.batches_per_epoch or ahead))


def _natural_scaling(profile: ScriptProfile) -> Scaling:
    """The scaling under which what makes the script's batches stays as it is.

    One process without a DataLoader makes the same on one device as on N, and so does each copy.
    """
    return "weak" if profile.world_size > 1 or not profile.accepts_batch_size else "strong"


def _probe_step_ms(
    found: Measurement, plan: Plan, profile: ScriptProfile, ahead: int
) -> float | None:
    """Of the last quarter of the steps, on the slowest rank.

    Where these were fed from queues, at least what the loader takes to make a step's
    batches; None where nobody could watch it.
    """
    last = PROBE_STEPS // 4
    ranks = [rank for rank in found.ranks if rank.step_ms]
    step_ms = max((median(rank.step_ms[-last:]) for rank in ranks), default=None)
    before = (rank.warmup_steps + len(rank.step_ms[:-last]) for rank in ranks)
    if step_ms is None or ahead <= min(before):
        return step_ms
    if profile.fetches is None or not profile.fetches.batches:
        return None
    return max(step_ms, loading_ms_per_step(plan, profile.fetches.batches, profile.fetches.seconds))


def _host_gaps_ms(found: Measurement) -> tuple[float, ...]:
    each = [rank.host_gaps_ms[rank.warmup_steps :] for rank in found.ranks]
    return tuple(median(pauses) for pauses in each) if all(each) else ()


def _rescaled_batch(batch: int, scaling: Scaling, profile: ScriptProfile, devices: int) -> int:
    if not profile.accepts_batch_size:
        other = "weak" if scaling == "strong" else "strong"
        raise UsageError(
            f"--scaling {scaling}: no DataLoader was seen whose batch could be changed; next: "
            f"--scaling {other}"
        )
    return batch // devices if scaling == "strong" else batch * devices
