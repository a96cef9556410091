"""The experiment: which trials run, in which order, and how often, until the time budget ends.

Causes that the probe run observed come first. On one device, the fixes of a cause that takes more
than half of its step follow at once. Then rounds measure all trials, each round in a random order,
so that drift affects all trials alike. What the first round finds calls for further trials (fixes,
pairs of causes removed together, other batch sizes), which come first in the next round. From the
third repeat on, a round repeats only the trials of the widest interval. On an unsteady host, the
second round begins with another process tree of the real run.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from nfold.core.errors import RunFailure, UsageError
from nfold.core.machine import Machine
from nfold.core.measurement import Measurement, RankSamples
from nfold.core.plan import LONG_STEP_S, WARMUP_STEPS, Plan
from nfold.core.script_profile import ScriptProfile
from nfold.core.source_location import display_path
from nfold.core.stats import median
from nfold.core.variant import Variant
from nfold.explain import planner
from nfold.explain.advice.caveats import find_training_errors
from nfold.explain.advice.pytorch import (
    gap_locations,
    may_visit_whole_data,
    unknown_epochs,
    with_gap_locations,
)
from nfold.explain.design import ExperimentDesign, Scaling, Trial, prefetched_batches
from nfold.explain.metrics import gpu_clock_rates, loading_ms_per_step
from nfold.explain.result.budget import NOT_ENOUGH_TIME
from nfold.explain.trials import (
    TrialResults,
    WorkloadRunner,
    failure_reason,
    failure_text,
    hit_time_limit,
)
from nfold.launch.launch_spec import StopRequest
from nfold.launch.training_checks import (
    OUT_OF_STEP,
    TRAINING_KINDS,
    check_same_samples,
    data_sets_differ,
)

PILOT_STEPS = 30
PROBE_STEPS = 40  # enough to use up the batches that a few workers prefetched
LONG_STEP_PROBE_STEPS = 13  # of a probe run if steps are long
MAX_ROUNDS = 6
MIN_TREES = 4  # process trees of a useful explanation
OVERRUN_FACTOR = 1.2  # a trial that was never measured may exceed the remaining time by so much
SLOWER_FACTOR = 2.0  # by which a tree may exceed what the probe run made expect
MIN_OVERRUN_S = 60.0  # that the trials an explanation needs may exceed a small time budget by
MODEL_PARALLEL_NAMES: dict[str, str] = {"tensor": "tensor parallel", "pipeline": "a pipeline"}
ProfileReader = Callable[[Measurement], tuple[ScriptProfile, ...]]  # per rank; empty if deleted


class ExperimentEvents:
    """Callbacks of an experiment. The base class ignores all events."""

    def planned(self, design: ExperimentDesign, results: TrialResults) -> None:
        """The design is complete; ``results`` will hold its trials."""

    def started(self, trials: Sequence[Trial], number: int, remaining_s: float) -> None:
        """A run of ``trials`` in one process tree starts, in round ``number``."""

    def updated(self, remaining_s: float) -> None:
        """The results of a measured trial were added."""

    def finished(
        self, trials: Sequence[Trial], number: int, found: Sequence[Measurement], remaining_s: float
    ) -> None:
        """``trials`` ran, well or not, or earlier measurements of them were found."""


@dataclass
class TimeBudget:
    """The time budget in seconds, which is the ``share`` of an explanation in the user's."""

    budget_s: float
    now: Callable[[], float] = time.monotonic
    share: float = 1.0
    started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.now()

    @property
    def remaining_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.budget_s - (self.now() - self.started_at))

    def sufficient_option(self, seconds: float) -> str:
        """Return the option ``--budget 90s`` that leaves an explanation so many seconds."""
        return f"--budget {planner.round_up(seconds / self.share)}s"

    @property
    def probe_limit_s(self) -> float:
        """Seconds that a probe run may take, with all that a script does before its steps."""
        return max(MIN_OVERRUN_S, self.budget_s)

    @property
    def required_s(self) -> float:
        """Seconds left for the trials without which there is no result; at most 0 if none."""
        left_s = self.budget_s - (self.now() - self.started_at)
        return left_s + max(MIN_OVERRUN_S, self.budget_s)


@dataclass
class Experiment:
    """The trials of one explanation while they run."""

    runner: WorkloadRunner
    time_budget: TimeBudget
    events: ExperimentEvents
    stop: StopRequest = field(default_factory=StopRequest)
    results: TrialResults = field(default_factory=TrialResults)
    max_rounds: int = MAX_ROUNDS
    _not_interleaved: set[Trial] = field(default_factory=set)
    _retried: set[Trial] = field(default_factory=set)
    _interleaved_failures: dict[Trial, str] = field(default_factory=dict)
    _finds_unused_parameters: bool = False
    _calls_collectives: bool = False
    _step_s: float = 0.0

    def run(self, design: ExperimentDesign) -> ExperimentDesign:
        """Measure the trials of ``design``.

        Returns the design with run lengths, the code in host gaps and the clock rates of the
        devices. Raises RunFailure if the baseline or the real run fails.
        """
        if design.profile is not None:
            self.runner = self.runner.with_profile(design.profile)
        design = self._with_run_length(design)
        self.events.planned(design, self.results)
        results = self.results
        self._finds_unused_parameters = design.facts.find_unused_parameters
        self._calls_collectives = design.facts.most_frequent("collective") is not None
        required, observed = list(planner.required(design)), list(planner.observed_in_probe(design))
        self._check_budget(design)
        # A cause that the probe run observed does not wait for the slots of all other trials.
        self._run_required(design, (design.actual(), design.baseline), observed or required)
        fixes = planner.dominant_fixes(design, results)
        self._run_round(self._affordable(fixes), 0, fixes)
        epochs = planner.epoch_boundary_trials(
            design, results, self.runner.epoch_steps, self.time_budget.budget_s
        )
        # Whether every epoch has the same order shows in the second one.
        order = epochs[:1] if design.facts.training_loader.epoch_unset else []
        urgent = [*order, *observed, *planner.batch_size_trials(design)]
        first_round = [*urgent, *required, *epochs]
        original_batch = functools.partial(
            planner.with_original_batch, design, results, self._interleaved_failures
        )
        self._run_round(self._affordable(first_round), 0, urgent, until=original_batch)
        other_design = original_batch()
        if other_design is not None:
            self.results = TrialResults()
            return self.run(other_design)
        self._run_round(first_round, 0)
        for number in range(1, self.max_rounds):
            follow_ups = planner.follow_ups(design, results)
            trials = self._next_trials(design, [*first_round, *follow_ups], number)
            tried = {**results.runs, **results.reasons}
            new = [one for one in dict.fromkeys([*follow_ups, *trials]) if one not in tried]
            if number == 1 and "unsteady" in results.unstable_steps():
                new = [design.actual(), *new]
            if self.stop or not self._run_round([*new, *trials], number, new):
                break
        return dataclasses.replace(
            with_gap_locations(design, results.measurements()),
            clock_rates=gpu_clock_rates(results.measurements(), design.devices),
        )

    def run_probe(self, trial: Trial, *, force: bool = False) -> Measurement:
        """Run a probe whatever time is left; it may fail. ``force`` ignores stored measurements."""
        found = None if force else self.runner.stored(trial, 0)
        if found is None:
            self.events.started([trial], 0, self.time_budget.remaining_s)
            found = self.runner.measure(trial, 0, self.time_budget.probe_limit_s)
        self.events.finished([trial], 0, [found], self.time_budget.remaining_s)
        return found

    def _with_run_length(self, design: ExperimentDesign) -> ExperimentDesign:
        step_s = self._step_s = (design.step_ms or self._pilot_step_ms(design)) / 1e3
        single = Trial(plan=design.plan.edit(steps=1, epochs=None))
        interleaved = self.runner.shared_trial(single) is not None
        return planner.with_run_length(design, step_s, interleaved=interleaved)

    def _check_budget(self, design: ExperimentDesign) -> None:
        """Raise RunFailure if a script starts and steps too slowly for the time budget."""
        required = (design.actual(), design.baseline)
        missing = [trial for trial in required if self.runner.stored(trial, 0) is None]
        tree_s = self._tree_seconds(design)
        needed_s = tree_s * len(missing)
        if design.start_s is None or needed_s <= self.time_budget.required_s:
            return
        option = self.time_budget.sufficient_option(MIN_TREES * tree_s)
        raise RunFailure(
            f"{_training_error(design)}{self.runner.workload} takes {design.start_s:.0f} s to "
            f"start and {self._step_s:.2g} s per step: its trials need {needed_s:.0f} s, "
            f"{self.time_budget.remaining_s:.0f} s are left; next: {option}"
        )

    def _pilot_step_ms(self, design: ExperimentDesign) -> float:
        pilot = Trial(plan=design.plan.edit(steps=PILOT_STEPS, epochs=None))
        self._run_required(design, [pilot])
        (found,) = self.results.runs.pop(pilot).values()
        return pilot.metrics(found)["step"]

    def _run_round(
        self,
        trials: Iterable[Trial],
        number: int,
        first: Collection[Trial] = (),
        until: Callable[[], object] = lambda: None,
    ) -> bool:
        """Run every trial once, until ``until`` returns true; return whether any was measured.

        The process trees of ``first`` come first, in this order, because the time budget may end.
        The others follow in random order.
        """
        groups = self._interleaved_groups(trials)
        random.Random(number).shuffle(groups)
        pending = [one for one in dict.fromkeys(first) if not self.results.is_done(one, number)]
        rank = {trial: place for place, trial in enumerate(pending)}
        groups.sort(key=lambda group: min(rank.get(trial, len(rank)) for trial in group))
        measured = [self._run_group(group, number) for group in groups if not until()]
        return any(measured)

    def _interleaved_groups(self, trials: Iterable[Trial]) -> list[list[Trial]]:
        """Group trials by process tree, in the order of the first trial of each tree.

        A wrapper that finds unused parameters exchanges them in every backward: a trial without
        gradient exchange needs a process tree of its own.
        """
        found: dict[object, list[Trial]] = {}
        for trial in dict.fromkeys(trials):
            own_tree = trial in self._not_interleaved or (
                self._finds_unused_parameters and trial.variant.exchange == "none"
            )
            shared = None if own_tree else self.runner.shared_trial(trial)
            found.setdefault((shared is None, shared or trial), []).append(trial)
        return list(found.values())

    def _affordable(self, trials: Iterable[Trial]) -> list[Trial]:
        left_s, fitting = self.time_budget.remaining_s, []
        for group in self._interleaved_groups(t for t in trials if not self.results.is_done(t, 0)):
            known = all(self.runner.stored(trial, 0) for trial in group)
            left_s -= 0.0 if known else self.results.expected_seconds(group)
            if left_s >= 0:
                fitting += group
        return fitting

    def _run_required(
        self, design: ExperimentDesign, required: Sequence[Trial], optional: Sequence[Trial] = ()
    ) -> None:
        """Run the trials that an explanation needs; they may exceed the time budget.

        ``optional`` trials that share their process trees run with them, unless steps are so long
        that the time budget does not allow it. A tree whose steps are far slower than those of the
        probe run leaves the time of the others. A trial that fails is retried once, because a
        script that passed its probe run may fail by chance.
        """
        for trial in required:
            while trial not in self.results.runs:
                if trial in self.results.reasons:
                    reason = self.results.reasons.pop(trial)
                    if self.results.out_of_step:
                        found = {OUT_OF_STEP: self.results.out_of_step}
                        (error,) = find_training_errors(found, None, design.facts)
                        raise RunFailure(f"wrong training: {error}")
                    # A hang takes its whole time limit each time.
                    final = reason.startswith(("hung", "interrupted"))
                    if self.stop or trial in self._retried or final:
                        error = _training_error(design)
                        raise RunFailure(
                            f"{error}{trial}: {reason}; there is nothing to compare with"
                        )
                    self._retried.add(trial)
                (group, *_) = self._interleaved_groups([trial, *optional])
                missing = [one for one in group if self._needs_run(one, 0)]
                if trial in missing:
                    seconds = self._tree_seconds(design, missing)
                    if self._step_s > LONG_STEP_S and seconds > self.time_budget.remaining_s:
                        missing = [trial]
                    trees = sum(one not in self.results.runs for one in required)
                    limit_s = self._required_limit_s(design, missing, trees)
                    if limit_s <= 0:
                        self.results.reasons[trial] = f"interrupted: {NOT_ENOUGH_TIME}"
                        continue
                    self._measure(missing, 0, limit_s)

    def _required_limit_s(
        self, design: ExperimentDesign, trials: Sequence[Trial], trees: int
    ) -> float:
        """Return the time limit of the next of ``trees`` process trees that must run.

        What an interleaved run has measured by then suffices.
        """
        share_s = self.time_budget.required_s / trees
        if design.start_s is None:
            return share_s
        expected_s = self._tree_seconds(design, trials)
        return min(share_s, max(self.time_budget.remaining_s / trees, SLOWER_FACTOR * expected_s))

    def _tree_seconds(self, design: ExperimentDesign, trials: Sequence[Trial] = ()) -> float:
        """Return the expected seconds of a process tree: one trial, or several interleaved ones."""
        if len(trials) > 1:
            steps_s = planner.interleaved_seconds(design, trials, self._step_s)
        else:
            steps_s = planner.run_seconds(design, self._step_s)
        return (design.start_s or 0.0) + steps_s

    def _run_group(self, group: Sequence[Trial], number: int) -> bool:
        """Run the trials of one process tree, if time allows; return whether any is measured.

        The limit is the remaining time plus the expected duration, because the work of a script
        between its epochs may take any time.
        """
        missing = [trial for trial in group if self._needs_run(trial, number)]
        seconds, new = self.results.expected_seconds(missing), not self.results.has(missing[:1])
        remaining_s = (OVERRUN_FACTOR if new else 1) * self.time_budget.remaining_s
        ended = self.stop or self.results.out_of_step
        if missing and not ended and seconds <= remaining_s:
            self._measure(missing, number, self.time_budget.remaining_s + seconds)
        return any(number in self.results.runs.get(trial, {}) for trial in group)

    def _needs_run(self, trial: Trial, number: int) -> bool:
        if self.results.is_done(trial, number):
            return False
        reason = self.runner.refusal_reason(trial)
        if reason is not None:
            self.results.reasons[trial] = reason
            return False
        retry = number == 0 and trial in self._retried
        found = None if retry else self.runner.stored(trial, number)
        if found is not None:
            self._record([trial], number, [found])
        return found is None

    def _measure(self, trials: Sequence[Trial], number: int, limit_s: float | None = None) -> None:
        self.events.started(trials, number, self.time_budget.remaining_s)
        if len(trials) > 1:
            found = self.runner.measure_interleaved(trials, number, limit_s)
        else:
            found = [self.runner.measure(trial, number, limit_s) for trial in trials]
        self._record(trials, number, found)
        self.events.updated(self.time_budget.remaining_s)

    def _record(self, trials: Sequence[Trial], number: int, found: list[Measurement]) -> None:
        """Add measurements to the results.

        A trial without a window when an interleaved run ended is not added: it runs again by itself.
        If no trial had one, ``_interleaved_failures`` gets the reason of the first. If a script calls
        collectives and a trial replaced them, its ranks may have stopped by local values: being out of
        step is no error of the script then.
        """
        intact = not self._calls_collectives or all(t.keeps_collectives for t in trials)
        self.events.finished(trials, number, found, self.time_budget.remaining_s)
        for trial, measurement in zip(trials, found, strict=True):
            ok = measurement.status == "ok"
            measured = ok and bool(trial.metrics(measurement))
            cause = (
                measurement.cause if measurement.cause and measurement.cause.out_of_step else None
            )
            if cause is not None and intact:
                self.results.out_of_step = self.results.out_of_step or cause.text
            would_recur = cause is not None and not trial.keeps_collectives
            retry = not (self.results.out_of_step or would_recur) and (ok or not self.stop)
            if len(trials) > 1 and not measured and retry:
                self._not_interleaved.add(trial)
            else:
                self.results.add(trial, number, measurement)
        failed = found[0].status in ("crashed", "unsupported")
        if self._not_interleaved.issuperset(trials) and failed:
            self._interleaved_failures[trials[0]] = failure_reason(found[0])

    def _next_trials(
        self, design: ExperimentDesign, trials: list[Trial], number: int
    ) -> list[Trial]:
        """Return all trials in the second and third round, then those of the widest interval.

        All trials of their process trees go with them: the difference between two trees cancels
        only among trials that ran in both.
        """
        if number < 3:
            return trials
        widest = planner.widest_interval(design, self.results)
        shared = {self.runner.shared_trial(trial) for trial in widest} - {None}
        return [*widest, *(one for one in trials if self.runner.shared_trial(one) in shared)]


def _training_error(design: ExperimentDesign) -> str:
    """Return what is wrong with the training by the probe run, to begin a message; or nothing."""
    found = {caveat.kind: caveat.text for caveat in design.probe_caveats}
    errors = find_training_errors(found, None, design.facts)
    return f"wrong training: {errors[0]}; " if errors else ""


def _with_data_division(profile: ScriptProfile, ranks: Sequence[RankSamples]) -> ScriptProfile:
    """Return the profile with what the samples of the ranks show about a sampler without shards.

    Each rank may have its part of the data as a data set of its own. Of a large data set ranks may
    share too few of the first samples to tell.
    """
    known = all(rank.indexed_samples for rank in ranks)
    own_data = data_sets_differ(ranks) if known else False
    if profile.loader is None or profile.loader.shards_dataset is not False or own_data is False:
        return profile
    loader = dataclasses.replace(profile.loader, shards_dataset=own_data)
    return dataclasses.replace(profile, loader=loader)


OWN_ERRORS = re.compile(
    r"\b(AttributeError|ImportError|IndentationError|KeyError"
    r"|ModuleNotFoundError|NameError|SyntaxError|TypeError|ZeroDivisionError)\b"
)


def probe_script(
    experiment: Experiment,
    devices_plan: Plan,
    scaling: Scaling | None,
    machine: Machine,
    read_profiles: ProfileReader,
) -> ExperimentDesign:
    """Run a script briefly and return the experiment design for the devices that it uses.

    The script starts as under torchrun, with a process per device. If it makes no process group,
    or fails, it runs again as one process that sees all devices. Raises RunFailure with the error
    of the script if neither trains.
    """
    name, several = str(experiment.runner.workload), devices_plan.devices != 1
    strategy = "ddp" if several else "single"
    plan = devices_plan.edit(strategy=strategy, steps=PROBE_STEPS, warmup_steps=WARMUP_STEPS)
    ranks = Trial(plan=plan, variant=Variant(profiler_steps=True))
    one_process = Trial(plan=plan.edit(strategy="dp"), variant=ranks.variant)
    others = (one_process,) if several else ()
    first, profiles = _run_probe(experiment, ranks, read_profiles, *others)
    if first.status == "ok" and (not several or any(one.process_group for one in profiles)):
        profile = profiles[0]
        if several and profile.parallel in MODEL_PARALLEL_NAMES:
            raise RunFailure(
                f"{name} divides its model over {devices_plan.devices or 1} devices "
                f"({MODEL_PARALLEL_NAMES[profile.parallel]}), which compute the same samples "
                "together; nfold compares only work that is divided by samples; next: --devices 1"
            )
        whole_data = None
        if several:
            whole_data = may_visit_whole_data(profile)
            share = profile.samples_per_step / max(1, profile.world_size)
            same = check_same_samples(first.ranks) is not None
            slices = same and 0 < profile.model_samples_per_step == share
            profile = dataclasses.replace(profile, slices_batches=slices)
            profile = _with_data_division(profile, first.ranks)
            cores = {core for one in profiles for core in one.core_ids}
            shared = len(cores) if 0 < len(cores) < len(profiles) else 0
            passes = tuple(batches for one in profiles for batches in one.pass_batches)
            passes = passes if len(passes) == len(profiles) else ()
            profile = dataclasses.replace(profile, shared_cores=shared, pass_batches=passes)
            unknown = None if same else unknown_epochs(profile)
            if unknown is not None:
                raise RunFailure(unknown)
        design = _design_from_probe(first, scaling or "weak", profile, machine)
        if whole_data is not None and profile.training_loader.shards_dataset is None:
            caveats = (*design.probe_caveats, whole_data)
            design = dataclasses.replace(design, probe_caveats=caveats)
        return design
    if not several or _fails_in_any_process(first):
        raise RunFailure(_failure_message(experiment, first))
    second, profiles = _run_probe(experiment, one_process, read_profiles)
    if second.status != "ok":
        failed = first if first.status != "ok" else second
        raise RunFailure(_failure_message(experiment, failed))
    profile = profiles[0]
    design = _design_from_probe(second, scaling or _natural_scaling(profile), profile, machine)
    failure = "" if first.status == "ok" else failure_text(first)
    return dataclasses.replace(
        design, multi_process_failure=failure, scaling_requested=scaling is not None
    )


def _run_probe(
    experiment: Experiment, trial: Trial, read: ProfileReader, *others: Trial
) -> tuple[Measurement, tuple[ScriptProfile, ...]]:
    """Run a probe, or find its measurement, and read the profiles of its ranks.

    A stored probe runs again if its folder is gone, and if it failed, unless one of ``others``
    is known to work.
    """
    stored = [experiment.runner.stored(one, 0) for one in (trial, *others)]
    works = any(one is not None and one.status == "ok" for one in stored)
    found = experiment.run_probe(trial, force=not works)
    profiles = read(found)
    if found.status == "ok" and not profiles:
        found = experiment.run_probe(trial, force=True)
        profiles = read(found)
    return found, profiles


def _failure_message(experiment: Experiment, failed: Measurement) -> str:
    runner = experiment.runner
    name, text = str(runner.workload), failure_text(failed)
    rank = (failed.cause.rank if failed.cause else None) or 0
    log = display_path(
        (runner.options.results / str(failed.folder) / f"rank-{rank}.log").absolute()
    )
    printed = f"; its output: {log}" if failed.folder else ""
    if failed.cause is not None and failed.cause.out_of_step:
        return f"wrong training: {text}{printed}"
    what = text if text.startswith(name) else f"{name} {failed.status}: {text}"
    return f"{what}{_probe_hint(failed, experiment.time_budget)}{printed}"


def _fails_in_any_process(failed: Measurement) -> bool:
    """Return whether another way to start the script cannot help.

    It has an error of its own, or starts and steps too slowly for the time budget.
    """
    text = failure_text(failed)
    out_of_step = failed.cause is not None and failed.cause.out_of_step
    return (
        out_of_step
        or hit_time_limit(failed)
        or failed.status == "unsupported"
        or (failed.status == "crashed" and OWN_ERRORS.search(text) is not None)
    )


def _probe_hint(failed: Measurement, time_budget: TimeBudget) -> str:
    timed_out = failed.status in ("hung", "interrupted")
    if timed_out and failed.cause is not None and failed.cause.step == 0:
        return (
            ": no step of a torch optimizer; next: add nfold.mark_step() after each update of the "
            "parameters, or a larger --budget if it needs so long to start"
        )
    if not hit_time_limit(failed) or failed.cause is None:
        return ""
    missing = max(1.0, LONG_STEP_PROBE_STEPS / (failed.cause.step or 1))
    option = time_budget.sufficient_option(MIN_TREES * missing * failed.wall_seconds)
    return f"; next: {option}"


def _design_from_probe(
    found: Measurement, scaling: Scaling, profile: ScriptProfile, machine: Machine
) -> ExperimentDesign:
    plan, loader = found.plan, profile.loader
    devices = max(profile.world_size, plan.devices or 1)
    batch = profile.global_batch_size or round((profile.samples_per_step or 1.0) * devices)
    scaling = "weak" if plan.devices == 1 else scaling
    natural = plan.devices == 1 or scaling == _natural_scaling(profile)
    if not natural:
        batch = _rescaled_batch(batch, scaling, profile, plan.devices or 1)
    queued = 0
    if loader is not None:
        queued = prefetched_batches(loader.num_workers, loader.prefetch_factor)
        queued = min(queued, profile.world_size * (loader.batches_per_epoch or queued))
    complete = plan.edit(
        batch=max(1, batch),
        accumulate=profile.accumulation,
        workers=loader.num_workers if loader else None,
        input="loader",
        precision=profile.precision,
        layout="channels_last" if profile.channels_last else "channels_first",
        step="compiled" if profile.compiled else "eager",
        batch_norm="synchronised" if profile.synchronised_batch_norms else "device",
        warmup_steps=WARMUP_STEPS + -(-queued // profile.accumulation),
    )
    gaps = [rank.host_gaps_ms[rank.warmup_steps :] for rank in found.ranks]
    return ExperimentDesign(
        plan=complete,
        scaling=scaling,
        profile=profile,
        step_ms=_probe_step_ms(found, complete, profile, queued) if natural else None,
        start_s=_start_seconds(found),
        host_gaps_ms=tuple(map(median, gaps)) if all(gaps) else (),
        gap_locations=gap_locations(found),
        probe_caveats=tuple(one for one in found.warnings if one.kind in TRAINING_KINDS),
        memory_bytes=(
            machine.gpus[0].memory_bytes if plan.device == "cuda" and machine.gpus else None
        ),
    )


def _start_seconds(probe: Measurement) -> float:
    """Return the time of a probe run without its steps: mostly before the first."""
    typical_s = max((median(rank.step_ms) for rank in probe.ranks if rank.step_ms), default=0) / 1e3
    steps = max((rank.warmup_steps + len(rank.step_ms) for rank in probe.ranks), default=0)
    return max(0.0, probe.wall_seconds - steps * typical_s)


def _natural_scaling(profile: ScriptProfile) -> Scaling:
    # The scaling that needs no other batch size. A process without a DataLoader makes the same
    # batches on one device as on N, and so does each replica.
    return "weak" if profile.world_size > 1 or not profile.accepts_batch_size else "strong"


def _probe_step_ms(
    found: Measurement, plan: Plan, profile: ScriptProfile, queued: int
) -> float | None:
    """Return the step time of the slowest rank in the last quarter of the steps.

    If prefetched batches fed these steps, the step takes at least as long as the loader needs for
    its batches; None if the loader was not observed.
    """
    last = PROBE_STEPS // 4
    ranks = [rank for rank in found.ranks if rank.step_ms]
    step_ms = max((median(rank.step_ms[-last:]) for rank in ranks), default=None)
    before = (rank.warmup_steps + len(rank.step_ms[:-last]) for rank in ranks)
    if step_ms is None or queued <= min(before):
        return step_ms
    if profile.fetches is None or not profile.fetches.batches:
        return None
    return max(step_ms, loading_ms_per_step(plan, profile.fetches.batches, profile.fetches.seconds))


def _rescaled_batch(batch: int, scaling: Scaling, profile: ScriptProfile, devices: int) -> int:
    if not profile.accepts_batch_size:
        other = "weak" if scaling == "strong" else "strong"
        raise UsageError(
            f"--scaling {scaling}: no DataLoader found whose batch size can change; next: "
            f"--scaling {other}"
        )
    return batch // devices if scaling == "strong" else batch * devices
