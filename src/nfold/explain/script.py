"""A script nobody changed: a first short run tells how it uses devices, and so what its plan is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nfold.ablation import Variant
from nfold.errors import RunFailure, UsageError
from nfold.explain.experiment import Experiment
from nfold.explain.ladder import ExperimentDesign, Scaling, prefetched_batches
from nfold.explain.measured import LARGER_BUDGET_HINT, failure_text, hit_time_limit
from nfold.explain.pausing import gap_locations
from nfold.explain.readings import loading_ms_per_step
from nfold.explain.rung import Trial
from nfold.machine import Machine
from nfold.measurement import Measurement
from nfold.plan import WARMUP_STEPS, Plan
from nfold.run.checks import check_same_samples
from nfold.seen import DataLoaderProfile, ScriptProfile
from nfold.stats import median

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
    """Whether all ranks were fed the same samples, of which a model gets a rank's part."""
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
    """What to do about a first look that hung, or that was over its time."""
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
    """The plan as the script itself has it: what equals its own is never imposed on it."""
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
    """Batches that queues may hold: none is left when an epoch ends, on one device alone either."""
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
    """What the host of each rank usually did between two steps; nothing where nobody could tell."""
    each = [rank.host_gaps_ms[rank.warmup_steps :] for rank in found.ranks]
    return tuple(median(pauses) for pauses in each) if all(each) else ()


def _rescaled_batch(batch: int, scaling: Scaling, profile: ScriptProfile, devices: int) -> int:
    """The global batch where the script's own, of one rank or of all, is taken the other way."""
    if not profile.accepts_batch_size:
        other = "weak" if scaling == "strong" else "strong"
        raise UsageError(
            f"--scaling {scaling}: no DataLoader was seen whose batch could be changed; next: "
            f"--scaling {other}"
        )
    return batch // devices if scaling == "strong" else batch * devices
