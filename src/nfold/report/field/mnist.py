"""Field report 2: one strategy object on one device and on several, and what became of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import ceil

from nfold import summary
from nfold.report import axes
from nfold.report.field import then
from nfold.report.field.base import (
    BLANK,
    NONE,
    Entry,
    FieldReport,
    Rows,
    Sheet,
    about,
    amount,
    differing_words,
    of_workload,
    told,
)
from nfold.report.results import Result
from nfold.report.words import count, duration, listed, times

HEADS = (
    "",
    "devices",
    "batch (each)",
    "accuracy",
    "time",
    "steps",
    "ms/step",
    "images/s",
    "speedup",
)


def report(found: Sequence[Result]) -> FieldReport:
    """Accuracy and time by framework, kind of data set, devices and batch per device."""
    mine = sorted(of_workload(found, "mnist"), key=_order)
    sentences = [*_frameworks(mine), *_accuracies(mine)]
    return FieldReport(
        name="mirrored-mnist",
        title="The MNIST tutorial on one device and on several",
        then=then.MNIST,
        sentences=tuple(sentences),
        sheets=(_table(mine),),
    )


def _order(result: Result) -> tuple[str, str, int, int]:
    plan = result.plan
    return (plan.framework, plan.input or "", result.batch, result.devices)


def _table(mine: Sequence[Result]) -> Sheet:
    rows = Rows("Accuracy and time", HEADS)
    for row in then.MNIST_ROWS:
        batch = row.devices * row.batch_per_device
        rows.add(
            told("then: TensorFlow 1"),
            told(row.devices),
            told(f"{batch:,} ({row.batch_per_device})"),
            amount(row.accuracy, 4),
            Entry(text=duration(row.seconds), value=row.seconds),
            told(then.MNIST_STEPS),
            amount(1e3 * row.seconds / then.MNIST_STEPS),
            amount(batch * then.MNIST_STEPS / row.seconds),
        )
    for result in mine:
        rows.add(*_row(rows, result, _who(result, mine)))
    return rows.sheet()


def _row(rows: Rows, result: Result, who: str) -> list[Entry]:
    batch = told(f"{result.batch:,} ({result.batch // result.devices})")
    first = [told(f"now: {who}"), told(result.devices), batch]
    if not result.ok:
        return [*first, rows.failed(result)]
    steps, seconds = _steps(result), result.training_s
    return [
        *first,
        about(result.accuracy, 4),
        NONE if seconds is None else Entry(text=duration(seconds), value=seconds),
        told(steps) if steps else NONE,
        amount(1e3 * seconds / steps) if seconds and steps else NONE,
        about(result.samples_per_s),
        _speedup(result),
    ]


def _speedup(result: Result) -> Entry:
    if result.comparison is None:
        return BLANK
    return Entry(
        text=f"{times(result.comparison.speedup.value)}",
        value=result.comparison.speedup,
    )


def _steps(result: Result) -> int:
    """Optimizer steps of all epochs, the incomplete last one of each counted."""
    done = summary.epochs(result.cell.ok[0])
    return sum(ceil(epoch.samples / result.batch) for epoch in done)


def _who(result: Result, mine: Sequence[Result]) -> str:
    """The framework, and what else differs: the kind of data set, how a step is run."""
    return axes.label(result.cell.first, ("framework", *differing_words(mine)))


def _frameworks(mine: Sequence[Result]) -> list[str]:
    """A sentence for each framework and kind of data set, of its most devices."""
    names = dict.fromkeys(_who(result, mine) for result in mine)
    made = [_scaling(name, [r for r in mine if _who(r, mine) == name]) for name in names]
    return [sentence for sentence in made if sentence]


def _scaling(name: str, own: Sequence[Result]) -> str:
    """Devices at a global batch as large as one's, and at one's batch each."""
    compared = [result for result in own if result.comparison is not None]
    if not compared:
        return ""
    most = max(result.devices for result in compared)
    batches = {r.batch for r in own if r.devices == 1}
    chosen = sorted((r for r in compared if r.devices == most), key=lambda r: r.batch)
    said = []
    for result in chosen:
        assert result.comparison is not None
        each = f"{result.batch // result.devices} per device"
        kept = "the batch as it was" if result.batch in batches else "one device's batch each"
        said.append(f"{times(result.comparison.speedup.value)} at {each} ({kept})")
    return f"{name}: {count(most, 'device')} do the images of one {listed(said)}."


def _accuracies(mine: Sequence[Result]) -> list[str]:
    """How far apart, in points, the accuracies of the same batch and length lie."""
    alike: dict[tuple[int, int], list[float]] = defaultdict(list)
    for result in mine:
        if result.accuracy is not None:
            alike[result.batch, _steps(result)].append(result.accuracy.value)
    return [
        f"The {len(known)} accuracies after {steps:,} steps of {batch:,} lie within "
        f"{100 * (max(known) - min(known)):.1f} points ({min(known):.4f} to {max(known):.4f})."
        for (batch, steps), known in sorted(alike.items())
        if len(known) > 1
    ]
