"""What casts doubt on a budget, and what says that the training itself is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nfold.explain import lines
from nfold.explain.causes.threads import too_many
from nfold.explain.causes.undivided_work import SIGN
from nfold.explain.fit import Fit
from nfold.explain.ladder import Ladder
from nfold.explain.measured import Measured, Varied
from nfold.explain.noise import LEAST_FREE
from nfold.measurement import Doubt
from nfold.seen import Seen
from nfold.stats import median

APART = "parameters_differ"
WRONG = (SIGN, APART)
"""Doubts that say the training itself is wrong."""
TOO_EARLY = (
    "parameters differ between ranks at the end: optimizers step in hooks of their parameters, "
    "inside backward, before DistributedDataParallel has sent their gradients, so that each rank "
    "trains with its own; next: dist.all_reduce() in the hook, or all steps after backward()"
)
"""Why they do under DDP where a script steps as soon as it has a gradient."""
NOT_DOUBTS = (*WRONG, "few_windows", "slow_rank")
"""Doubts that are said elsewhere: runs are short on purpose, and slow ranks have a row."""
CROWDED = "many_threads"
"""Of more threads than cores: where all ranks of the script have them, there is a row for it."""

VARIED: dict[Varied, str] = {
    "unsteady": "the same step with the same batches took {:.3g} to {:.3g} ms in its turns: this "
    "host, or its devices, are now faster and now slower; next: a larger --budget, or a host that "
    "nobody else uses",
    "changing_batches": "steps with real batches went from {:.3g} to {:.3g} ms from turn to turn, "
    "those with batches given again did not: batches change while it trains (their size, or how "
    "fast they are read), and that change is in what the input seems to cost; next: explain it "
    "where they stay alike",
}
"""What is said of steps that were longer in one turn than in another, with both."""

LOOKING_MS, NOTICED = 0.1, 0.02
"""What nfold does in a step of a script whose batches are made in the process that trains (0.09 ms
of a small host's core, 0.05 where they are given again), and what part of a step is noticed.
"""


def wrong(kinds: Mapping[str, str], whole: str | None, seen: Seen | None) -> tuple[str, ...]:
    """What is wrong, of doubts by their kinds; ``whole``: that ranks get all of the data."""
    too_early = seen is not None and seen.in_backward and seen.parallel == "ddp"
    why = {APART: TOO_EARLY} if too_early else {}
    found = tuple(why.get(kind, text) for kind, text in kinds.items() if kind in WRONG)
    return (*found, whole) if whole else found


def warnings(ladder: Ladder, measured: Measured, fit: Fit) -> tuple[Doubt, ...]:
    """The other doubts of all runs, and whether too few were made to see how they differ."""
    others = (*NOT_DOUBTS, *[CROWDED] * too_many(ladder))
    found = [doubt for doubt in measured.doubts() if doubt.kind not in others]
    if fit.free < LEAST_FREE:
        text = (
            "too few repeats to see how runs differ: intervals are from inside single runs, or "
            "from two that differ more"
        )
        found.append(Doubt(kind="few_repeats", text=text))
    return (
        *_ended_early(measured),
        *_varied(measured),
        *_in_own_orders(ladder, measured),
        *_uneven(ladder),
        *found,
    )


def _in_own_orders(ladder: Ladder, measured: Measured) -> Iterator[Doubt]:
    """That ranks draw from all of the data without end, and not the same at the same time."""
    told = lines.whole_without_end(ladder.seen) if ladder.seen is not None else None
    if told is not None and SIGN not in {doubt.kind for doubt in measured.doubts()}:
        yield Doubt(kind="own_orders", text=told)


def _uneven(ladder: Ladder) -> Iterator[Doubt]:
    """That some ranks may have nothing to do while others end their passes."""
    if ladder.seen is not None and ladder.seen.uneven:
        text = (
            "ranks may have unequal numbers of batches, and Join has the others wait: no pass ends "
            "in these runs, so that wait is in no row; next: divide the batches evenly"
        )
        yield Doubt(kind="uneven_batches", text=text)


def _ended_early(measured: Measured) -> Iterator[Doubt]:
    """That a script was over before all of its steps were timed that should be."""
    fewest = min(measured.cut_short(), key=lambda short: short[0], default=None)
    if fewest is not None:
        steps, name, cause = fewest
        text = f"some were timed for {steps} steps"
        if cause is not None:
            text = f"a run of {name} ended before its time ({cause.text}): {text}"
        else:
            ended = f"{name} ends by itself before its runs are long enough"
            text = f"{ended}: {text}; next: more epochs or more data"
        yield Doubt(kind="ended_early", text=text)


def _varied(measured: Measured) -> Iterator[Doubt]:
    """That a step was not as long in one turn as in another."""
    for kind, most in measured.varied().items():
        text = VARIED[kind].format(most.low_ms, most.high_ms)
        yield Doubt(kind=kind, text=text, value=most.times)


def short(ladder: Ladder, step_ms: float) -> tuple[Doubt, ...]:
    """That a script's steps are so short that what nfold does in each is noticed.

    On CPU devices: a GPU goes on meanwhile, unless it waits for its host.
    """
    seen = ladder.seen is not None and ladder.plan.device == "cpu"
    if not seen or NOTICED * step_ms > LOOKING_MS:
        return ()
    text = (
        f"steps of {step_ms:.2g} ms are short: nfold's own part of each, up to {LOOKING_MS} ms, is "
        "in all of these; next: the script's own clock for its rate, or a larger batch"
    )
    return (Doubt(kind="short_steps", text=text, value=step_ms),)


def overtaken(ladder: Ladder, measured: Measured, step_ms: float) -> tuple[Doubt, ...]:
    """That another library without the devices is faster than all of them in an operation."""
    runs = (run for rung in (ladder.full(), ladder.one) for run in measured.runs[rung].values())
    others = [part for run in runs for part in run.ranks[0].parts if part.baseline]
    taken = ((1e3 * median(part.seconds), part.name) for part in others)
    other_ms, name = min(taken, default=(step_ms, ""))
    if other_ms >= step_ms:
        return ()
    of = f"{ladder.devices} device{'s' * (ladder.devices > 1)}"
    text = (
        f"{name} takes {other_ms:.3g} ms without them, {of} {step_ms:.3g} from "
        "the host's memory and back; next: compute more on what is copied, or leave it there"
    )
    return (Doubt(kind="overtaken", text=text),)
