"""The probe run of a script: what it trains, on which devices, and the experiment for it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from nfold.core.errors import RunFailure, UsageError
from nfold.core.machine import Machine
from nfold.core.measurement import Measurement, RankSamples
from nfold.core.plan import WARMUP_STEPS, Plan, prefetched_batches
from nfold.core.script_profile import ScriptProfile
from nfold.core.source_location import display_path
from nfold.core.stats import median
from nfold.core.variant import Variant
from nfold.explain.advice.pytorch import gap_locations, may_visit_whole_data, unknown_epochs
from nfold.explain.design import ExperimentDesign, Scaling, Trial
from nfold.explain.experiment import MIN_TREES, Experiment
from nfold.explain.metrics import loading_ms_per_step
from nfold.explain.time_budget import TimeBudget
from nfold.explain.trials import failure_text, hit_time_limit
from nfold.launch.training_checks import TRAINING_KINDS, check_same_samples, data_sets_differ

PROBE_STEPS = 40  # enough to use up the batches that a few workers prefetched
LONG_STEP_PROBE_STEPS = 13  # of a probe run if steps are long
MODEL_PARALLEL_NAMES: dict[str, str] = {"tensor": "tensor parallel", "pipeline": "a pipeline"}
ProfileReader = Callable[[Measurement], tuple[ScriptProfile, ...]]  # per rank; empty if deleted
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
