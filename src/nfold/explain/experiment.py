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
from nfold.core.measurement import Measurement
from nfold.core.plan import LONG_STEP_S, WARMUP_STEPS, Plan
                self.results.add(trial, number, measurement)
        if self._not_interleaved.issuperset(trials) and found[0].status in (
            "crashed",
            "unsupported",
        ):
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
<<<<<<< HEAD
        asked = planner.widest_interval(design, self.results)
        shared = {self.runner.shared_trial(rung) for rung in asked} - {None}
        return [*asked, *(rung for rung in trials if self.runner.shared_trial(rung) in shared)]


OWN_ERRORS = re.compile(
    r"\b(AttributeError|FileNotFoundError|ImportError|IndentationError|IndexError|KeyError"
    r"|ModuleNotFoundError|NameError|SyntaxError|TypeError|ZeroDivisionError)\b"
)
PROBE_STEPS = 40
"""Steps of a first look: by its end, what a few workers made ahead is used up."""
MODEL_PARALLEL_NAMES: dict[str, str] = {"tensor": "tensor parallel", "pipeline": "a pipeline"}
ProfileReader = Callable[[Measurement], tuple[ScriptProfile, ...]]
"""What every rank saw in a measurement; empty where that is no longer there."""
=======
        widest = planner.widest_interval(design, self.results)
        shared = {self.runner.shared_trial(trial) for trial in widest} - {None}
        return [*widest, *(one for one in trials if self.runner.shared_trial(one) in shared)]
>>>>>>> explaincore


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
    name, several = experiment.runner.target_name, devices_plan.devices != 1
    strategy = "ddp" if several else "single"
    plan = devices_plan.edit(strategy=strategy, steps=PROBE_STEPS, warmup_steps=WARMUP_STEPS)
    ranks = Trial(plan=plan, variant=Variant(profiler_steps=True))
    one_process = Trial(plan=plan.edit(strategy="dp"), variant=ranks.variant)
    others = (one_process,) if several else ()
    first, profiles = _run_probe(experiment, ranks, read_profiles, *others)
    if not several:
        if first.status != "ok":
<<<<<<< HEAD
            raise RunFailure(_failure_message(experiment.runner, first))
        return _design_from_probe(first, scaling or "weak", seen[0], machine)
    if first.status == "ok" and any(one.process_group for one in seen):
        if seen[0].parallel in MODEL_PARALLEL_NAMES:
=======
            raise RunFailure(_failure_message(name, first))
        return _design_from_probe(first, scaling or "weak", profiles[0], machine)
    if first.status == "ok" and any(profile.process_group for profile in profiles):
        profile = profiles[0]
        if profile.parallel in MODEL_PARALLEL_NAMES:
>>>>>>> explaincore
            raise RunFailure(
                f"{name} divides its model over {devices_plan.devices or 1} devices "
                f"({MODEL_PARALLEL_NAMES[profile.parallel]}), which compute the same samples "
                "together; nfold explains only work that is divided by samples; next: --devices 1, "
                "to explain one device"
            )
<<<<<<< HEAD
        own = dataclasses.replace(seen[0], slices_batches=_slices_batches(first, seen[0]))
        return _design_from_probe(first, scaling or "weak", own, machine)
    if _fails_in_any_process(first):
        raise RunFailure(_failure_message(experiment.runner, first))
    second, seen = _run_probe(experiment, single, read_profiles)
    failed = next((m for m in (first, second) if m.status != "ok"), None)
    if second.status != "ok" and failed is not None:
        raise RunFailure(_failure_message(experiment.runner, failed))
    made = _design_from_probe(second, scaling or _natural_scaling(seen[0]), seen[0], machine)
    why = "" if first.status == "ok" else failure_text(first)
=======
        profile = dataclasses.replace(profile, slices_batches=_slices_batches(first, profile))
        return _design_from_probe(first, scaling or "weak", profile, machine)
    second, profiles = _run_probe(experiment, one_process, read_profiles)
    if second.status != "ok":
        failed = first if first.status != "ok" else second
        raise RunFailure(_failure_message(name, failed))
    design = _design_from_probe(
        second, scaling or _natural_scaling(profiles[0]), profiles[0], machine
    )
    failure = "" if first.status == "ok" else failure_text(first)
>>>>>>> explaincore
    return dataclasses.replace(
        design, multi_process_failure=failure, scaling_requested=scaling is not None
    )


def _slices_batches(found: Measurement, profile: ScriptProfile) -> bool:
    share = profile.samples_per_step / max(1, profile.world_size)
    same = check_same_samples(found.ranks) is not None
    return same and 0 < profile.model_samples_per_step == share


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


def _failure_message(runner: TrialRunner, failed: Measurement) -> str:
    name, text = runner.target_name, failure_text(failed)
    rank = (failed.cause.rank if failed.cause else None) or 0
<<<<<<< HEAD
    log = display_path((runner.results_folder / str(failed.folder) / f"rank-{rank}.log").absolute())
    printed = f"; its output: {log}" if failed.folder else ""
    what = text if text.startswith(name) else f"{name} {failed.status}: {text}"
    return f"{what}{_probe_hint(failed)}{printed}"


def _fails_in_any_process(failed: Measurement) -> bool:
    """Whether another way to start the script cannot help: it has an error of its own."""
    text = failure_text(failed)
    return failed.status == "crashed" and (
        "without a step of a torch optimizer" in text or OWN_ERRORS.search(text) is not None
    )
=======
    log = f" (output: {failed.folder}/rank-{rank}.log in the results folder)"
    cause = f"{failure_text(failed)}{_probe_hint(failed)}"
    return f"{name} {failed.status}: {cause}{log * bool(failed.folder)}; nothing can be explained"
>>>>>>> explaincore


def _probe_hint(failed: Measurement) -> str:
    timed_out = failed.status in ("hung", "interrupted")
    if timed_out and failed.cause is not None and failed.cause.step == 0:
        return (
            ": no step of a torch optimizer; next: a script that trains, or a larger --budget if "
            "it needs so long to start"
        )
    return LARGER_BUDGET_HINT if hit_time_limit(failed) else ""


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
        host_gaps_ms=tuple(map(median, gaps)) if all(gaps) else (),
        gap_locations=gap_locations(found),
        memory_bytes=(
            machine.gpus[0].memory_bytes if plan.device == "cuda" and machine.gpus else None
        ),
    )


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
