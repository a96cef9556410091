"""A script nobody changed: a first short run tells how it uses devices, and so what its plan is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nfold.ablation import Ablation
from nfold.errors import RunFailure, UsageError
from nfold.explain.experiment import Experiment
from nfold.explain.ladder import Ladder, Scaling, made_ahead
from nfold.explain.measured import LONGER, cause_of, over_its_time
from nfold.explain.pausing import where
from nfold.explain.readings import made_ms
from nfold.explain.rung import Rung
from nfold.machine import Machine
from nfold.measurement import Measurement
from nfold.plan import WARMUP_STEPS, Plan
from nfold.run.checks import same_samples
from nfold.seen import Loader, Seen
from nfold.stats import median

LOOK_STEPS = 40
"""Steps of a first look: by its end, what a few workers made ahead is used up."""
DIVIDED: dict[str, str] = {"tensor": "tensor parallel", "pipeline": "a pipeline"}
Read = Callable[[Measurement], tuple[Seen, ...]]
"""What every rank saw in a measurement; empty where that is no longer there."""


def first_look(
    experiment: Experiment, place: Plan, scaling: Scaling | None, machine: Machine, read: Read
) -> Ladder:
    """The ladder of a script on the devices of ``place``, as it uses them by itself.

    It is started as torchrun starts it, a process a device. Where it does not make a process
    group, or fails, it is run again as one process that sees all devices, if there are several.
    Raises RunFailure with the script's own error where neither trains.
    """
    several = place.devices != 1
    strategy = "ddp" if several else "single"
    looked = place.edit(strategy=strategy, steps=LOOK_STEPS, warmup_steps=WARMUP_STEPS)
    ranks = Rung(plan=looked, ablation=Ablation(traced=True))
    single = Rung(plan=looked.edit(strategy="dp"), ablation=ranks.ablation)
    first, seen = _look(experiment, ranks, read, *((single,) if several else ()))
    if not several:
        if first.status != "ok":
            raise RunFailure(_why(experiment.target.name, first))
        return _ladder(first, scaling or "weak", seen[0], machine)
    if first.status == "ok" and any(one.process_group for one in seen):
        if seen[0].parallel in DIVIDED:
            raise RunFailure(_divided(experiment.target.name, seen[0], place.devices or 1))
        own = dataclasses.replace(seen[0], slices=_slices(first, seen[0]))
        return _ladder(first, scaling or "weak", own, machine)
    second, seen = _look(experiment, single, read)
    failed = next((m for m in (first, second) if m.status != "ok"), None)
    if second.status != "ok" and failed is not None:
        raise RunFailure(_why(experiment.target.name, failed))
    made = _ladder(second, scaling or _own_scaling(seen[0]), seen[0], machine)
    why = "" if first.status == "ok" else cause_of(first)
    return dataclasses.replace(made, failed=why, asked=scaling is not None)


def _slices(found: Measurement, seen: Seen) -> bool:
    """Whether all ranks were fed the same samples, of which a model gets a rank's part."""
    part = seen.samples_per_step / max(1, seen.world_size)
    return same_samples(found.ranks) is not None and 0 < seen.through_model == part


def _divided(name: str, seen: Seen, devices: int) -> str:
    return (
        f"{name} divides its model over {devices} devices ({DIVIDED[seen.parallel]}): they compute "
        "the same samples together, on purpose, and nfold explains work that is divided by samples"
        "; next: --devices 1, for what one device loses"
    )


def _look(
    experiment: Experiment, rung: Rung, read: Read, *others: Rung
) -> tuple[Measurement, tuple[Seen, ...]]:
    """The run, and what was seen in it; one whose folder is gone is run anew.

    So is one that failed, unless another way to start the script is known to work: what it lacked
    may be there now.
    """
    stored = [experiment.target.known(one, 0) for one in (rung, *others)]
    works = any(one is not None and one.status == "ok" for one in stored)
    found = experiment.attempt(rung, anew=not works)
    seen = read(found)
    if found.status == "ok" and not seen:
        found = experiment.attempt(rung, anew=True)
        seen = read(found)
    return found, seen


def _why(name: str, failed: Measurement) -> str:
    rank = (failed.cause.rank if failed.cause else None) or 0
    log = f" (what it printed: {failed.folder}/rank-{rank}.log in the results folder)"
    printed = log if failed.folder else ""
    cause = f"{cause_of(failed)}{_hint(failed)}"
    return f"{name} {failed.status}: {cause}{printed}; nothing can be explained"


def _hint(failed: Measurement) -> str:
    """What to do about a first look that hung, or that was over its time."""
    timed_out = failed.status in ("hung", "interrupted")
    if timed_out and failed.cause is not None and failed.cause.step == 0:
        return (
            ": it took no step of a torch optimizer; next: a script that trains, or, where it "
            "takes so long to begin, a larger --budget"
        )
    return LONGER if over_its_time(failed) else ""


def _ladder(found: Measurement, scaling: Scaling, seen: Seen, machine: Machine) -> Ladder:
    """The plan as the script itself has it: what equals its own is never imposed on it."""
    plan = found.plan
    each = max(seen.world_size, plan.devices or 1)
    batch = seen.batch or round((seen.samples_per_step or 1.0) * each)
    scaling, own = ("weak", True) if plan.devices == 1 else (scaling, scaling == _own_scaling(seen))
    if not own:
        batch = _other_scaling(batch, scaling, seen, plan.devices or 1)
    workers = seen.loader.workers if seen.loader else None
    ahead = _ahead(seen.loader, seen.world_size)
    made = plan.edit(
        batch=max(1, batch),
        accumulate=seen.accumulation,
        workers=workers,
        input="loader",
        precision=seen.precision,
        layout="channels_last" if seen.channels_last else "channels_first",
        step="compiled" if seen.compiled else "eager",
        batch_norm="synchronised" if seen.synchronised_batch_norms else "device",
        warmup_steps=WARMUP_STEPS + -(-ahead // seen.accumulation),
    )
    memory = machine.gpus[0].memory_bytes if plan.device == "cuda" and machine.gpus else None
    return Ladder(
        plan=made,
        scaling=scaling,
        seen=seen,
        step_ms=_step_ms(found, made, seen, ahead) if own else None,
        pauses_ms=_pauses_ms(found),
        paused_at=where(found),
        memory_bytes=memory,
    )


def _ahead(loader: Loader | None, world_size: int) -> int:
    """Batches that queues may hold: none is left when an epoch ends, on one device alone either."""
    if loader is None:
        return 0
    ahead = made_ahead(loader.workers, loader.prefetch_factor)
    return min(ahead, world_size * (loader.batches or ahead))


def _own_scaling(seen: Seen) -> Scaling:
    """The scaling under which what makes the script's batches stays as it is.

    One process without a DataLoader makes the same on one device as on N, and so does each copy.
    """
    return "weak" if seen.world_size > 1 or not seen.rebatches else "strong"


def _step_ms(found: Measurement, made: Plan, seen: Seen, ahead: int) -> float | None:
    """Of the last quarter of the steps, on the slowest rank.

    Where these were fed from queues, at least what the loader takes to make a step's
    batches; None where nobody could watch it.
    """
    last = LOOK_STEPS // 4
    ranks = [rank for rank in found.ranks if rank.step_ms]
    step_ms = max((median(rank.step_ms[-last:]) for rank in ranks), default=None)
    before = (rank.warmup_steps + len(rank.step_ms[:-last]) for rank in ranks)
    if step_ms is None or ahead <= min(before):
        return step_ms
    if seen.fetches is None or not seen.fetches.batches:
        return None
    return max(step_ms, made_ms(made, seen.fetches.batches, seen.fetches.seconds))


def _pauses_ms(found: Measurement) -> tuple[float, ...]:
    """What the host of each rank usually did between two steps; nothing where nobody could tell."""
    each = [rank.pauses_ms[rank.warmup_steps :] for rank in found.ranks]
    return tuple(median(pauses) for pauses in each) if all(each) else ()


def _other_scaling(batch: int, scaling: Scaling, seen: Seen, devices: int) -> int:
    """The global batch where the script's own, of one rank or of all, is taken the other way."""
    if not seen.rebatches:
        other = "weak" if scaling == "strong" else "strong"
        raise UsageError(
            f"--scaling {scaling}: no DataLoader was seen whose batch could be changed; next: "
            f"--scaling {other}"
        )
    return batch // devices if scaling == "strong" else batch * devices
