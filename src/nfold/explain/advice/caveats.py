"""What casts doubt on a budget, and what says that the training itself is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nfold.core.measurement import Caveat
from nfold.core.script_profile import ScriptProfile
from nfold.core.stats import median
from nfold.explain.advice import pytorch
from nfold.explain.causes import Cause, applicable_causes
from nfold.explain.causes.epoch_boundary import EpochBoundaryCause
from nfold.explain.causes.host_processes import has_too_many_threads
from nfold.explain.causes.work_division import SAME_SAMPLES
from nfold.explain.design import ExperimentDesign
from nfold.explain.estimate.bootstrap import BootstrapFit, MetricView
from nfold.explain.estimate.uncertainty import MIN_DEGREES_OF_FREEDOM
from nfold.explain.result.budget import NOT_ENOUGH_TIME, LowerBound
from nfold.explain.trials import TrialResults, UnstableKind

PARAMETERS_DIFFER = "parameters_differ"
TRAINING_ERROR_KINDS = (SAME_SAMPLES, PARAMETERS_DIFFER)
"""Doubts that say the training itself is wrong."""
OPTIMIZER_IN_BACKWARD = (
    "parameters differ between ranks at the end: optimizers step in hooks of their parameters, "
    "inside backward, before DistributedDataParallel has sent their gradients, so that each rank "
    "trains with its own; next: dist.all_reduce() in the hook, or all steps after backward()"
)
"""Why they do under DDP where a script steps as soon as it has a gradient."""
SHOWN_ELSEWHERE = (*TRAINING_ERROR_KINDS, "few_windows", "slow_rank")
"""Doubts that are said elsewhere: runs are short on purpose, and slow ranks have a row."""
MANY_THREADS = "many_threads"
"""Of more threads than cores: where all ranks of the script have them, there is a row for it."""

UNSTABLE_TEXTS: dict[UnstableKind, str] = {
    "unsteady": "the same step with the same batches took {:.3g} to {:.3g} ms in its turns: this "
    "host, or its devices, are now faster and now slower; next: a larger --budget, or a host that "
    "nobody else uses",
    "changing_batches": "steps with real batches went from {:.3g} to {:.3g} ms from turn to turn, "
    "those with batches given again did not: batches change while it trains (their size, or how "
    "fast they are read), and that change is in what the input seems to cost; next: explain it "
    "where they stay alike",
}
"""What is said of steps that were longer in one turn than in another, with both."""

OVERHEAD_MS, NOTICEABLE_FRACTION = 0.1, 0.02
"""What nfold does in a step of a script whose batches are made in the process that trains (0.09 ms
of a small host's core, 0.05 where they are given again), and what part of a step is noticed.
"""


def find_training_errors(
    caveat_texts: Mapping[str, str], duplicated_epochs: str | None, profile: ScriptProfile | None
) -> tuple[str, ...]:
    """What is wrong, of doubts by their kinds; ``whole``: that ranks get all of the data."""
    too_early = profile is not None and profile.steps_in_backward and profile.parallel == "ddp"
    why = {PARAMETERS_DIFFER: OPTIMIZER_IN_BACKWARD} if too_early else {}
    found = tuple(
        why.get(kind, text) for kind, text in caveat_texts.items() if kind in TRAINING_ERROR_KINDS
    )
    return (*found, duplicated_epochs) if duplicated_epochs else found


def collect_caveats(
    design: ExperimentDesign, results: TrialResults, fit: BootstrapFit
) -> tuple[Caveat, ...]:
    """The other doubts of all runs, and whether too few were made to see how they differ."""
    others = (*SHOWN_ELSEWHERE, *[MANY_THREADS] * has_too_many_threads(design))
    found = [doubt for doubt in results.caveats() if doubt.kind not in others]
    if fit.degrees_of_freedom < MIN_DEGREES_OF_FREEDOM:
        text = (
            "too few repeats to see how runs differ: intervals are from inside single runs, or "
            "from two that differ more"
        )
        found.append(Caveat(kind="few_repeats", text=text))
    return (
        *_ended_early(results),
        *_unstable_steps(results),
        *_independent_orders(design, results),
        *_uneven(design),
        *found,
    )


def _independent_orders(design: ExperimentDesign, results: TrialResults) -> Iterator[Caveat]:
    told = pytorch.duplicated_samples(design.profile) if design.profile is not None else None
    if told is not None and SAME_SAMPLES not in {doubt.kind for doubt in results.caveats()}:
        yield Caveat(kind="own_orders", text=told)


def _uneven(design: ExperimentDesign) -> Iterator[Caveat]:
    if design.profile is not None and design.profile.uses_join:
        text = (
            "ranks may have unequal numbers of batches, and Join has the others wait: no pass ends "
            "in these runs, so that wait is in no row; next: divide the batches evenly"
        )
        yield Caveat(kind="uneven_batches", text=text)


def _ended_early(results: TrialResults) -> Iterator[Caveat]:
    fewest = min(results.ended_early(), key=lambda short: short[0], default=None)
    if fewest is not None:
        steps, name, cause = fewest
        text = f"some were timed for {steps} steps"
        if cause is not None:
            text = f"a run of {name} ended before its time ({cause.text}): {text}"
        else:
            ended = f"{name} ends by itself before its runs are long enough"
            text = f"{ended}: {text}; next: more epochs or more data"
        yield Caveat(kind="ended_early", text=text)


def _unstable_steps(results: TrialResults) -> Iterator[Caveat]:
    for kind, most in results.unstable_steps().items():
        text = UNSTABLE_TEXTS[kind].format(most.low_ms, most.high_ms)
        yield Caveat(kind=kind, text=text, value=most.ratio)


def short_step_caveats(design: ExperimentDesign, step_ms: float) -> tuple[Caveat, ...]:
    """That a script's steps are so short that what nfold does in each is noticed.

    On CPU devices: a GPU goes on meanwhile, unless it waits for its host.
    """
    seen = design.profile is not None and design.plan.device == "cpu"
    if not seen or NOTICEABLE_FRACTION * step_ms > OVERHEAD_MS:
        return ()
    text = (
        f"steps of {step_ms:.2g} ms are short: nfold's own part of each, up to {OVERHEAD_MS} ms, is "
        "in all of these; next: the script's own clock for its rate, or a larger batch"
    )
    return (Caveat(kind="short_steps", text=text, value=step_ms),)


def faster_library_caveats(
    design: ExperimentDesign, results: TrialResults, step_ms: float
) -> tuple[Caveat, ...]:
    """That another library without the devices is faster than all of them in an operation."""
    runs = (
        run for rung in (design.actual(), design.baseline) for run in results.runs[rung].values()
    )
    others = [part for run in runs for part in run.ranks[0].parts if part.baseline]
    taken = ((1e3 * median(part.seconds), part.name) for part in others)
    other_ms, name = min(taken, default=(step_ms, ""))
    if other_ms >= step_ms:
        return ()
    of = f"{design.devices} device{'s' * (design.devices > 1)}"
    text = (
        f"{name} takes {other_ms:.3g} ms without them, {of} {step_ms:.3g} from "
        "the host's memory and back; next: compute more on what is copied, or leave it there"
    )
    return (Caveat(kind="overtaken", text=text),)


def unmeasured_causes(
    design: ExperimentDesign, results: TrialResults, view: MetricView
) -> list[tuple[str, str]]:
    """Each with its reason: a plan cannot have it, its runs failed, or there was no time."""
    found = []
    for cause in applicable_causes(design):
        asked = {*cause.multi_device_trials(design), *cause.one_device_evidence(design)}
        reason = cause.skipped_reason(design) or results.missing_reason(asked)
        unknown = cause.unknown_part(design, view) if reason is None else None
        if unknown is not None:
            reason = unknown + _unmeasured_reason(cause, design, results)
        if reason is not None:
            found.append((cause.id, reason))
    return found


def _unmeasured_reason(cause: Cause, design: ExperimentDesign, results: TrialResults) -> str:
    never = cause.endless_reason(design) if isinstance(cause, EpochBoundaryCause) else None
    if never is not None:
        return never
    told = [results.reasons.get(rung) for rung in cause.refining_trials(design)]
    return next(filter(None, reversed(told)), NOT_ENOUGH_TIME)


def epoch_boundary_lower_bound(
    design: ExperimentDesign, results: TrialResults, view: MetricView
) -> LowerBound | None:
    """What lies between two epochs of a script, where one device's is unknown.

    Where a run of passes that are cut short was ended in it, so long at least.
    """
    if design.profile is None:
        return None
    cause, full = EpochBoundaryCause(), design.actual()
    steps = design.epoch_steps(full.plan)
    if steps and view.has_epoch_gap(full) and not view.has_epoch_gap(design.baseline):
        seconds, fix = view.epoch_gap(full) * steps / 1e3, cause.fix(design, view)
        return LowerBound(
            seconds=seconds, steps=steps, devices=design.devices, fix=fix, is_complete=True
        )
    for rung in cause.short_epoch_trials(design):
        steps, stalled_s = design.epoch_steps(rung.plan), results.stalled_s.get(rung)
        if steps and stalled_s:
            fix, devices = (
                pytorch.shorten_epoch_boundary(design.profile, waits=False),
                rung.plan.devices or 1,
            )
            return LowerBound(seconds=stalled_s, steps=steps, devices=devices, fix=fix)
    return None
