"""Field report 3: images distorted on the CPU or on the device."""

from __future__ import annotations

from collections.abc import Sequence

from nfold import summary
from nfold.comparison import throughput_ratio
from nfold.report import axes
from nfold.report.field import then
from nfold.report.field.base import (
    BLANK,
    NONE,
    Entry,
    FieldReport,
    Rows,
    Sheet,
    device_counts,
    differing,
    of_workload,
    told,
)
from nfold.report.field.groups import FREE, Group, batch_groups
from nfold.report.results import Result
from nfold.report.words import bounds, count, number, times


def report(found: Sequence[Result]) -> FieldReport:
    """Images/s and s/batch by place of the distortion, then and now."""
    mine = of_workload(found, "inception_v3")
    groups = batch_groups(mine)
    sentences = [*_placements(mine, groups), *_scalings(mine, groups)]
    return FieldReport(
        name="inception-input",
        title="Inception-v3 with its distortions on the CPU and on the device",
        then=then.INCEPTION,
        sentences=tuple(sentences),
        sheets=(_table(mine, groups),),
    )


def _table(mine: Sequence[Result], groups: Sequence[Group]) -> Sheet:
    counts = sorted({1, 2, *device_counts(mine)})
    heads = ["", "batch", *(count(n, "device") for n in counts)]
    rows = Rows("images/s, s/batch", heads)
    for place in ("cpu", "device"):
        reported = [then.INCEPTION_RATES.get((place, n)) for n in counts]
        entries = [_reported(*pair) if pair else BLANK for pair in reported]
        rows.add(told(f"then: distortion on {place}"), told("32"), *entries)
    for group in groups:
        entries = [_now(rows, group.cells.get(n)) for n in counts]
        rows.add(told(f"now: {_who(group, mine)}"), told(group.batch), *entries)
    return rows.sheet()


def _reported(rates: tuple[float, float], batches: tuple[float, float]) -> Entry:
    """A range as it was published."""
    seconds = "–".join(f"{s:.2f}" for s in dict.fromkeys(batches))
    return Entry(
        text=f"{rates[0]}–{rates[1]}, {seconds}",
        value={"samples_per_s": list(rates), "s_per_batch": list(batches)},
    )


def _now(rows: Rows, result: Result | None) -> Entry:
    if result is None:
        return BLANK
    rate = result.samples_per_s
    if not result.ok:
        return rows.failed(result)
    if rate is None:
        return NONE
    step = summary.step_ms(result.cell)
    seconds = step.value / 1e3 if step else result.batch / rate.value
    return Entry(
        text=f"{number(rate.value)}, {number(seconds)}",
        value={"samples_per_s": rate, "s_per_batch": seconds},
    )


def _who(group: Group, mine: Sequence[Result]) -> str:
    """Where the distortion is, and whatever else differs between the cells."""
    first = group.first.cell.first
    others = [axis for axis in differing(mine) if axis not in ("augment", *FREE)]
    named = " · ".join(_named(first.plan, axis, axes.label(first, [axis])) for axis in others)
    where = f"distortion on {first.plan.augment}"
    return f"{where} · {named}" if named else where


def _named(plan: object, axis: str, label: str) -> str:
    return f"{axis} on {getattr(plan, axis)}" if axis == "decode" else label


def _placements(mine: Sequence[Result], groups: Sequence[Group]) -> list[str]:
    """Of plans that differ only in the place of the distortion: device over CPU."""
    found = []
    for group in groups:
        other = next((one for one in groups if _is_counterpart(group, one)), None)
        if group.first.plan.augment != "device" or other is None:
            continue
        for n in sorted(group.cells.keys() & other.cells.keys()):
            ratio = throughput_ratio(group.cells[n].cell, other.cells[n].cell)
            if ratio is not None:
                interval = f" ({bounds(ratio, 2)})" if bounds(ratio) else ""
                found.append(
                    f"{_who(group, mine)}, batch {group.batch}, {count(n, 'device')}: "
                    f"{times(ratio.value)}{interval} the images/s with it on the CPU."
                )
    return found


def _is_counterpart(group: Group, other: Group) -> bool:
    """Whether the two differ in nothing but the place of the distortion, and loader workers."""
    differing = set(group.first.plan.diff(other.first.plan)) - {"workers"}
    return differing == {"augment"} and group.first.cell.first.workload == (
        other.first.cell.first.workload
    )


def _scalings(mine: Sequence[Result], groups: Sequence[Group]) -> list[str]:
    """The slowest and the fastest placement on the most devices, each against its own one."""
    scaled = [g for g in groups if g.most.comparison is not None and g.most.samples_per_s]
    if not scaled:
        return []
    ends = sorted(scaled, key=lambda g: g.most.samples_per_s.value if g.most.samples_per_s else 0.0)
    found = []
    for word, group in {"slowest": ends[0], "fastest": ends[-1]}.items():
        comparison = group.most.comparison
        assert comparison is not None
        found.append(
            f"The {word} on {count(group.most.devices, 'device')}, {_who(group, mine)}: "
            f"{times(comparison.speedup.value)} one device."
        )
    return found if len(ends) > 1 else found[:1]
