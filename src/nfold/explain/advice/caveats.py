"""Why numbers of a budget are uncertain, and why the training itself is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nfold.core.format import join_words, pluralize
from nfold.core.measurement import NO_GRADIENT_EXCHANGE, Caveat
from nfold.core.script_profile import ScriptProfile
from nfold.core.stats import median
from nfold.explain.advice import pytorch
from nfold.explain.advice.exchange_repairs import repair_exchange
from nfold.explain.causes import applicable_causes
from nfold.explain.causes.cause import skipped_reason
from nfold.explain.causes.cost_model import one_device_trials_and_step
from nfold.explain.causes.epoch_boundary import EPOCH_BOUNDARY, endless_reason, short_epoch_trials
from nfold.explain.causes.growing_work import GROWING_WORK
from nfold.explain.causes.host_processes import has_too_many_threads
from nfold.explain.design import ExperimentDesign
from nfold.explain.estimate.bootstrap import BootstrapFit, MetricView
from nfold.explain.estimate.uncertainty import MIN_DEGREES_OF_FREEDOM
from nfold.explain.result.budget import EXCHANGE_REPAIR, NOT_ENOUGH_TIME, SHARED_CORES, LowerBound
from nfold.explain.trials import TrialResults, UnstableKind
from nfold.launch.training_checks import (
    ERROR_KINDS,
    OUT_OF_STEP,
    PARAMETERS_DIFFER,
    PART_NOT_EXCHANGED,
    REPEATED_SAMPLES,
    SAME_ORDER,
)

OPTIMIZER_IN_BACKWARD = (
    "parameters differ between ranks at the end: optimizers step in parameter hooks during backward, "
    "before DistributedDataParallel all-reduces the gradients, so every rank trains on its own; "
    "next: dist.all_reduce() in the hook, or all optimizer steps after backward()"
)
AVERAGED_RARELY = (
    "parameters differ between ranks at the end: each rank trains its own; next: all-reduce the "
    "gradients in every step, or, if ranks average their parameters every few steps, add "
    "nfold.mark_step() after the average{} and once before the training loop"
)
PAST_WRAPPER = (
    "gradients are not exchanged, parameters differ between ranks: {} calls the model past its "
    "DistributedDataParallel; next: call the wrapped model there"
)
FROZEN_WHEN_WRAPPED = (
    "; DistributedDataParallel exchanges the parameters that require gradients when it is "
    "constructed{}; next: unfreeze all before that (learning rate 0 until they are trained), or wrap "
    "the model again after unfreezing"
)
# Runs are short on purpose, and slow ranks have a row.
SHOWN_ELSEWHERE = (*ERROR_KINDS, "few_windows", "slow_rank")
MANY_THREADS = "many_threads"

UNSTABLE_TEXTS: dict[UnstableKind, str] = {
    "unsteady": "the same step on the same batches took {:.3g} to {:.3g} ms: step time drifts on "
    "this host (other load, or clock changes); next: a larger --budget, or an idle host",
    "changing_batches": "steps with real batches changed from {:.3g} to {:.3g} ms, steps with "
    "replayed batches did not: batches change during training (their size, or their read time), "
    "and the cost of the input contains that change; next: explain a part of the training whose "
    "batches are alike",
}

# nfold's own time in a step of a script that loads batches in the training process: 0.09 ms of a
# small host's core, 0.05 ms with replayed batches.
OVERHEAD_MS, NOTICEABLE_FRACTION = 0.1, 0.02


def find_training_errors(
    caveat_texts: Mapping[str, str], duplicated_epochs: str | None, profile: ScriptProfile
) -> tuple[str, ...]:
    """Return the errors among the caveats, given by kind, and that of undivided epochs."""
    found = [
        _explain_error(kind, caveat_texts[kind], profile)
        for kind in ERROR_KINDS
        if kind in caveat_texts
    ]
    return (*found, *filter(None, [duplicated_epochs]))


def _explain_error(kind: str, text: str, profile: ScriptProfile) -> str:
    """Return the error with the line that causes it and the next step, if they are known."""
    loader = profile.training_loader
    if kind == REPEATED_SAMPLES and loader.num_workers > 1:
        text = (
            f"each of the {loader.num_workers} loader workers yields all samples of the rank: {text}; "
            "next: divide them by torch.utils.data.get_worker_info() in the data set"
        )
    if kind == OUT_OF_STEP and loader.created_at and loader.batches_per_epoch is None:
        return f"{text}{_unequal_passes(loader.created_at, profile.pass_batches)}"
    if kind in (REPEATED_SAMPLES, SAME_ORDER):
        return pytorch.at_location(loader.created_at, text)
    if kind != PARAMETERS_DIFFER:
        return text
    if profile.parallel == "ddp" and profile.steps_in_backward:
        return OPTIMIZER_IN_BACKWARD
    if PART_NOT_EXCHANGED in text and profile.parallel == "ddp":
        line = profile.most_frequent_line("wrapper")
        return text + FROZEN_WHEN_WRAPPED.format(f" ({line})" if line else "")
    if NO_GRADIENT_EXCHANGE not in text:
        return text
    past_wrapper = profile.most_frequent_line("past_wrapper")
    if past_wrapper is not None:
        return PAST_WRAPPER.format(past_wrapper)
    if _may_average_rarely(profile):
        line = profile.most_frequent_line("collective")
        return AVERAGED_RARELY.format(f" ({line})" if line else "")
    wrap = "" if profile.parallel == "ddp" else "; next: wrap the model in DistributedDataParallel"
    return f"{text}{wrap}"


def _unequal_passes(created_at: str, batches: Sequence[int]) -> str:
    """Return what is known about the passes of the ranks over a DataLoader without a length."""
    if not batches:
        return (
            f"; the DataLoader of {created_at} has no length: ranks may have unequal numbers of "
            "batches"
        )
    if len(set(batches)) == 1:
        return ""
    named = join_words([f"{count:,} batches on rank {rank}" for rank, count in enumerate(batches)])
    return f"; a pass over the DataLoader of {created_at} has {named}"


def _may_average_rarely(profile: ScriptProfile) -> bool:
    without_wrapper = profile.process_group and profile.parallel in ("none", "other")
    return without_wrapper or profile.comm_hook.startswith("post_localSGD")


def collect_caveats(
    design: ExperimentDesign, results: TrialResults, fit: BootstrapFit
) -> Iterator[Caveat]:
    """Yield all caveats of the trials that are not training errors."""
    fewest = min(results.ended_early(), key=lambda short: short[0], default=None)
    if fewest is not None and not results.out_of_step:
        steps, name, cause = fewest
        text = f"some trials have {steps} timed steps"
        if cause is not None:
            text = f"a trial of {name} ended early ({cause.text}): {text}"
        else:
            ended = f"{name} ends before the trials are long enough"
            text = f"{ended}: {text}; next: more epochs or more data"
        yield Caveat(kind="ended_early", text=text)
    for kind, most in results.unstable_steps().items():
        text = UNSTABLE_TEXTS[kind].format(most.low_ms, most.high_ms)
        yield Caveat(kind=kind, text=text, value=most.ratio)
    if design.facts.shared_cores:
        cores = float(design.facts.shared_cores)
        text = pytorch.restore_affinity(design.facts)
        yield Caveat(kind=SHARED_CORES, text=text, value=cores)
    if skipped_reason(GROWING_WORK, design) is None:
        yield Caveat(kind=GROWING_WORK.id, text=GROWING_WORK.fix(design, fit.view))
    repair = repair_exchange(design.facts)
    if repair and design.devices > 1 and not design.uses_one_process:
        yield Caveat(kind=EXCHANGE_REPAIR, text=repair)
    if design.facts.uses_join:
        text = (
            "ranks may have unequal numbers of batches, and Join makes the others wait at the end "
            "of an epoch: no trial reaches it, so that wait is not measured; next: divide the "
            "batches evenly"
        )
        yield Caveat(kind="uneven_batches", text=text)
    others = (*SHOWN_ELSEWHERE, *[MANY_THREADS] * has_too_many_threads(design))
    every = [caveat for run in results.measurements() for caveat in run.warnings]
    every += design.probe_caveats
    first = {caveat.kind: caveat for caveat in reversed(every)}  # of every kind
    yield from (caveat for kind, caveat in first.items() if kind not in others)
    if fit.degrees_of_freedom < MIN_DEGREES_OF_FREEDOM:
        text = (
            "too few repeats to know how runs differ: intervals come from inside single runs, or "
            "from two runs that differ more"
        )
        yield Caveat(kind="few_repeats", text=text)


def short_step_caveats(design: ExperimentDesign, step_ms: float) -> tuple[Caveat, ...]:
    """Warn if nfold's own time is a noticeable part of a step. Only of CPU devices: a GPU computes
    meanwhile.
    """
    on_cpu = design.profile is not None and design.plan.device == "cpu"
    if not on_cpu or NOTICEABLE_FRACTION * step_ms > OVERHEAD_MS:
        return ()
    text = (
        f"steps of {step_ms:.2g} ms are short: every one contains up to {OVERHEAD_MS} ms of nfold's "
        "own time; next: a larger batch, or the script's own clock for its throughput"
    )
    return (Caveat(kind="short_steps", text=text, value=step_ms),)


def faster_library_caveats(
    design: ExperimentDesign, results: TrialResults, step_ms: float
) -> tuple[Caveat, ...]:
    """Warn if another library computes an operation faster without the devices."""
    runs = (
        run for trial in (design.actual(), design.baseline) for run in results.runs[trial].values()
    )
    others = [part for run in runs for part in run.ranks[0].parts if part.baseline]
    taken = ((1e3 * median(part.seconds), part.name) for part in others)
    other_ms, name = min(taken, default=(step_ms, ""))
    if other_ms >= step_ms:
        return ()
    text = (
        f"{name} takes {other_ms:.3g} ms on the host, {pluralize(design.devices, 'device')} "
        f"{step_ms:.3g} ms with the copies to the devices and back; next: compute more per copy, or "
        "keep the data on the devices"
    )
    return (Caveat(kind="overtaken", text=text),)


def unmeasured_causes(
    design: ExperimentDesign, results: TrialResults, view: MetricView
) -> list[tuple[str, str]]:
    """Return causes without a measured cost, each with its reason."""
    found = []
    for cause in applicable_causes(design):
        costs = cause.costs(design)
        trials = (*costs.trials, *one_device_trials_and_step(costs))
        reason = skipped_reason(cause, design) or results.missing_reason(trials)
        if reason is None and cause is EPOCH_BOUNDARY:
            reason = _unknown_epoch_boundary(design, results, view)
        if reason is not None:
            found.append((cause.id, reason))
    return found


def _unknown_epoch_boundary(
    design: ExperimentDesign, results: TrialResults, view: MetricView
) -> str | None:
    costs = EPOCH_BOUNDARY.costs(design)
    unknown = costs.unknown_part(view)
    if unknown is None:
        return None
    reasons = (results.reasons.get(trial) for trial in reversed(costs.refining_trials))
    return unknown + (endless_reason(design) or next(filter(None, reasons), NOT_ENOUGH_TIME))


def epoch_boundary_lower_bound(
    design: ExperimentDesign, results: TrialResults, view: MetricView
) -> LowerBound | None:
    """Return the known part of the epoch boundary of a script, if that of one device is unknown.

    If a trial with shortened epochs was stopped between two epochs, the boundary is longer.
    """
    if design.profile is None:
        return None
    full, loader = design.actual(), design.facts.training_loader
    steps = loader.steps_per_epoch(full.plan.batch)
    if steps and view.has_epoch_gap(full) and not view.has_epoch_gap(design.baseline):
        seconds, fix = float(view.epoch_gap(full)) * steps / 1e3, EPOCH_BOUNDARY.fix(design, view)
        return LowerBound(
            seconds=seconds, steps=steps, devices=design.devices, fix=fix, is_complete=True
        )
    for trial in short_epoch_trials(design):
        stalled_s = results.stalled_s.get(trial)
        steps = loader.steps_per_epoch(trial.plan.batch)
        if steps and stalled_s:
            fix = pytorch.shorten_epoch_boundary(design.profile, waits=False)
            devices = trial.plan.devices or 1
            return LowerBound(seconds=stalled_s, steps=steps, devices=devices, fix=fix)
    return None
