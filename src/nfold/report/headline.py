"""The result at a glance, in one or two sentences that are computed, never written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nfold.comparison import Comparison
from nfold.inert import inert
from nfold.report import axes
from nfold.report.parts import Timing
from nfold.report.results import Result, main_comparisons
from nfold.report.words import STATUS, bounds, count, listed, number, percent, times
from nfold.stats import Interval

END_TO_END = "end to end"
"""How the parts begin that do the whole way from host to host."""


def headline(found: Sequence[Result], timings: Sequence[Timing] = ()) -> list[str]:
    """What the cells of one section say in a few sentences, the most important first."""
    sentences = [_scaling(found) or _fastest(found), _peers(timings), _failures(found)]
    return [inert(sentence) for sentence in sentences if sentence]


def _scaling(found: Sequence[Result]) -> str:
    """On the most devices: the fastest cell's speedup, and the one that scales worst."""
    compared = main_comparisons(found)
    if not compared:
        return ""
    devices = max(r.devices for r in compared)
    most = [r for r in compared if r.devices == devices]
    best = max(most, key=lambda r: _speedup(r).value)
    worst = min(most, key=lambda r: _speedup(r).value)
    name = count(devices, "device")
    differing = _places(best, worst)
    sentence = f"{name} are {_compared(best)}{_at(best, differing)}"
    if worst is best or _overlap(_speedup(best), _speedup(worst)):
        return f"{sentence}."
    return f"{sentence}, and {times(_speedup(worst).value)}{_at(worst, differing)}."


def _speedup(result: Result) -> Interval:
    assert result.comparison is not None
    return result.comparison.speedup


def _compared(result: Result) -> str:
    """``1.83× as fast as one (1.80–1.86, 92 % efficiency)``."""
    comparison = result.comparison
    assert isinstance(comparison, Comparison)
    speedup = comparison.speedup
    weak = "at its share of the batch" if comparison.scaling == "weak" else ""
    about = ", ".join(filter(None, [bounds(speedup, 2), _efficiency(comparison), weak]))
    verdict = "slower than one: " if (speedup.high or speedup.value) < 1 else ""
    return f"{verdict}{times(speedup.value)} as fast as one ({about})"


def _efficiency(comparison: Comparison) -> str:
    return f"{percent(comparison.efficiency.value)} efficiency"


def _overlap(first: Interval, second: Interval) -> bool:
    """Whether two intervals have a value in common: then they are not told apart."""
    if first.low is None or second.high is None:
        return first.value == second.value
    return first.low <= second.high


def _places(best: Result, worst: Result) -> tuple[str, ...]:
    """What tells the two cells apart, and the batch in any case."""
    found = axes.varying([best.cell, worst.cell]) if best is not worst else ()
    return tuple(dict.fromkeys(["batch", *(axis for axis in found if axis != "devices")]))


def _at(result: Result, differing: Sequence[str]) -> str:
    return f" at {axes.label(result.cell.first, differing).replace(' · ', ', ')}"


def _fastest(found: Sequence[Result]) -> str:
    """Without a comparison: the fastest cell."""
    timed = [(r.samples_per_s, r) for r in found if r.samples_per_s is not None]
    if not timed:
        return "No measurement ran to its end."
    rate, best = max(timed, key=lambda pair: pair[0].value)
    place = axes.label(best.cell.first, ("devices", "batch")).replace(" · ", " at ")
    lead = "The fastest: " if len(timed) > 1 else ""
    return f"{lead}{number(rate.value)} images/s on {place}."


def _peers(timings: Sequence[Timing]) -> str:
    """For an operation: the devices' fastest whole way against the fastest other library."""
    whole = [t for t in timings if t.part.startswith(END_TO_END) and not t.baseline]
    peers = [t for t in timings if t.baseline]
    if not whole or not peers:
        return ""
    best = min(whole, key=lambda t: t.ms.value)
    peer = min(peers, key=lambda t: t.ms.value)
    ratio = peer.ms.value / best.ms.value
    verdict = f"{number(ratio)}× as fast as" if ratio >= 1 else f"{number(1 / ratio)}× slower than"
    return (
        f"{_capital(best.part)} on {best.column}: {number(best.ms.value)} ms, {verdict} "
        f"{peer.part} ({number(peer.ms.value)} ms)."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _failures(found: Sequence[Result]) -> str:
    """How many cells have no numbers, and why."""
    failed = Counter(STATUS[r.cell.worst.status] for r in found if not r.ok)
    if not failed:
        return ""
    kinds = listed([f"{many} {status}" for status, many in failed.items()])
    total = sum(failed.values())
    verb = "has" if total == 1 else "have"
    return f"{total} of {count(len(found), 'cell')} {verb} no result: {kinds}."
