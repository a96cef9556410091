"""The conclusion of a section in one or two sentences, computed from its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nfold.analysis import cell_labels
from nfold.analysis.comparison import CellResult, Comparison, strong_or_weak_comparisons
from nfold.analysis.part_timings import PartTiming
from nfold.core.format import (
    STATUS_LABELS,
    format_number,
    format_percent,
    format_range,
    format_ratio,
    join_words,
    pluralize,
    terminal_safe,
)
from nfold.core.stats import Interval

END_TO_END_PREFIX = "end to end"  # names of the parts that measure host to host begin so


def headline_sentences(
    found: Sequence[CellResult], timings: Sequence[PartTiming] = ()
) -> list[str]:
    """Return the conclusions of one section, the most important first."""
    sentences = [_scaling(found) or _fastest(found), _peers(timings), _failures(found)]
    return [terminal_safe(sentence) for sentence in sentences if sentence]


def _scaling(found: Sequence[CellResult]) -> str:
    compared = strong_or_weak_comparisons(found)
    if not compared:
        return ""
    devices = max(r.devices for r in compared)
    most = [r for r in compared if r.devices == devices]
    best = max(most, key=lambda r: _speedup(r).value)
    worst = min(most, key=lambda r: _speedup(r).value)
    name = pluralize(devices, "device")
    differing = _places(best, worst)
    sentence = f"{name} are {_compared(best)}{_at(best, differing)}"
    if worst is best or _overlap(_speedup(best), _speedup(worst)):
        return f"{sentence}."
    return f"{sentence}, and {format_ratio(_speedup(worst).value)}{_at(worst, differing)}."


def _speedup(result: CellResult) -> Interval:
    assert result.comparison is not None
    return result.comparison.speedup


def _compared(result: CellResult) -> str:
    comparison = result.comparison
    assert isinstance(comparison, Comparison)
    speedup = comparison.speedup
    weak = "at its share of the batch" if comparison.scaling == "weak" else ""
    caveats = "; ".join(c.text for c in comparison.caveats if c.kind != "weak_scaling")
    about = ", ".join(filter(None, [format_range(speedup, 2), _efficiency(comparison), weak]))
    about = "; ".join(filter(None, [about, caveats]))
    verdict = "slower than one: " if (speedup.high or speedup.value) < 1 else ""
    return f"{verdict}{format_ratio(speedup.value)} as fast as one ({about})"


def _efficiency(comparison: Comparison) -> str:
    return f"{format_percent(comparison.efficiency.value)} efficiency"


def _overlap(first: Interval, second: Interval) -> bool:
    if first.low is None or second.high is None:
        return first.value == second.value
    return first.low <= second.high


def _places(best: CellResult, worst: CellResult) -> tuple[str, ...]:
    found = cell_labels.varying_axes([best.cell, worst.cell]) if best is not worst else ()
    return tuple(dict.fromkeys(["batch", *(axis for axis in found if axis != "devices")]))


def _at(result: CellResult, differing: Sequence[str]) -> str:
    return f" at {cell_labels.cell_label(result.cell.first, differing).replace(' · ', ', ')}"


def _fastest(found: Sequence[CellResult]) -> str:
    timed = [(r.samples_per_s, r) for r in found if r.samples_per_s is not None]
    if not timed:
        return "No measurement ran to its end."
    rate, best = max(timed, key=lambda pair: pair[0].value)
    place = cell_labels.cell_label(best.cell.first, ("devices", "batch")).replace(" · ", " at ")
    lead = "The fastest: " if len(timed) > 1 else ""
    return f"{lead}{format_number(rate.value)} images/s on {place}."


def _peers(timings: Sequence[PartTiming]) -> str:
    whole = [t for t in timings if t.part.startswith(END_TO_END_PREFIX) and not t.baseline]
    peers = [t for t in timings if t.baseline]
    if not whole or not peers:
        return ""
    best = min(whole, key=lambda t: t.ms.value)
    peer = min(peers, key=lambda t: t.ms.value)
    ratio = peer.ms.value / best.ms.value
    verdict = (
        f"{format_number(ratio)}× as fast as"
        if ratio >= 1
        else f"{format_number(1 / ratio)}× slower than"
    )
    return (
        f"{_capital(best.part)} on {best.column}: {format_number(best.ms.value)} ms, {verdict} "
        f"{peer.part} ({format_number(peer.ms.value)} ms)."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _failures(found: Sequence[CellResult]) -> str:
    failed = Counter(
        STATUS_LABELS[r.cell.first_failed_or_first.status] for r in found if not r.succeeded
    )
    if not failed:
        return ""
    kinds = join_words([f"{many} {status}" for status, many in failed.items()])
    total = sum(failed.values())
    verb = "has" if total == 1 else "have"
    return f"{total} of {pluralize(len(found), 'cell')} {verb} no result: {kinds}."
