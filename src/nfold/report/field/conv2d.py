"""Field report 1: one convolution over the devices, and what its one number hid."""

from __future__ import annotations

from collections.abc import Sequence

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
    device_counts,
    of_workload,
    parameters,
    told,
)
from nfold.report.parts import Timing, timings
from nfold.report.results import Result
from nfold.report.words import count, listed, number, percent, times

END_TO_END, COPY_ONLY, FIRST = "end to end", "copy only", "first call"
CONVOLVE2D = "scipy.signal.convolve2d, 1 core"
DEFAULTS = {"filter": 3, "channels": 1, "copy_only": 0}
TORCH, OTHERS = "torch", ("tensorflow", "jax")
COMPARED = (FIRST, COPY_ONLY, END_TO_END, "convolution, warm cache", "resident loop")
"""The parts, or how their names begin, in which frameworks are compared."""
AT_LEAST = 2.0
"""From here on the first call is said to hide what the devices do."""


def report(found: Sequence[Result]) -> FieldReport:
    """The table of the field report, each part apart, the CPU's, and the larger filters."""
    everyone = of_workload(found, "conv2d")
    mine = _of(everyone, TORCH)
    plain = _plain(mine)
    others = {name: _plain(_alike(_of(everyone, name), plain)) for name in OTHERS}
    timed = {devices: _timed(result) for devices, result in plain.items()}
    sentences = [_first(timed), _scaling(timed), _copies(timed), _peer(timed), _larger(mine)]
    compared = {name: cells for name, cells in {TORCH: plain, **others}.items() if cells}
    sheets = [_parts(plain, timed), _cpu(timed), _problems(mine)]
    if compared.keys() - {TORCH}:
        sentences.append(_libraries(compared))
        sheets.append(_frameworks(compared))
    return FieldReport(
        name="conv2d-devices",
        title="One convolution over 1 to N devices, every part timed apart",
        then=then.CONV2D,
        sentences=tuple(sentence for sentence in sentences if sentence),
        sheets=tuple(sheets),
    )


def _of(found: Sequence[Result], framework: str) -> list[Result]:
    """The cells of one framework; whatever is no other one counts as torch's."""

    def known(result: Result) -> str:
        return result.plan.framework if result.plan.framework in OTHERS else TORCH

    return [result for result in found if known(result) == framework]


def _plain(found: Sequence[Result]) -> dict[int, Result]:
    """The field report's own problem on its most images, by devices."""
    alike = [r for r in found if _problem(r) == tuple(DEFAULTS.values())]
    return _by_devices([r for r in alike if r.batch == max(one.batch for one in alike)])


def _problem(result: Result) -> tuple[int, ...]:
    """Filter, channels, and whether it is only copied."""
    chosen = parameters(result)
    return tuple(chosen.get(name, default) for name, default in DEFAULTS.items())


def _posed(result: Result) -> tuple[int, ...]:
    """The problem, and on how many images."""
    return (*_problem(result), result.batch)


def _by_devices(found: Sequence[Result]) -> dict[int, Result]:
    """The fastest cell on each number of devices, or one that failed."""

    def rate(result: Result) -> float:
        return result.samples_per_s.value if result.samples_per_s else 0.0

    ordered = sorted(found, key=lambda r: (r.devices, rate(r)))
    return {result.devices: result for result in ordered}


def _timed(result: Result) -> dict[str, Timing]:
    """The parts of one cell by name."""
    return {timing.part: timing for timing in timings([result])}


def _whole(timed: dict[str, Timing]) -> Timing | None:
    """The way from host to host and back at its fastest; of a copy alone, that."""
    for begin in (END_TO_END, COPY_ONLY):
        ways = [timing for name, timing in timed.items() if name.startswith(begin)]
        if ways:
            return min(ways, key=lambda timing: timing.ms.value)
    return None


def _parts(plain: dict[int, Result], timed: dict[int, dict[str, Timing]]) -> Sheet:
    """Milliseconds down by part, then and now, across by devices."""
    reported = range(1, 1 + len(then.CONV2D_MS["V100"]))
    counts = sorted({*reported, *plain})
    rows = Rows("The whole batch by number of devices [ms]", ["devices", *map(str, counts)])
    for card, values in then.CONV2D_MS.items():
        known = dict(zip(reported, values, strict=True))
        rows.add(told(f"then: {card}, one call"), *(amount(known.get(n)) for n in counts))
    failed = {n: result for n, result in plain.items() if not result.ok}
    names = dict.fromkeys(n for one in timed.values() for n, t in one.items() if not t.baseline)
    for name in names:
        found = {n: one[name] for n, one in timed.items() if name in one}
        entries = [about(found[n].ms) if n in found else NONE for n in counts]
        rows.add(told(f"now: {name}"), *entries)
    if failed:
        entries = [rows.failed(failed[n]) if n in failed else BLANK for n in counts]
        rows.add(told("now: no result"), *entries)
    return rows.sheet()


def _cpu(timed: dict[int, dict[str, Timing]]) -> Sheet:
    """What the devices have to beat."""
    rows = Rows("The batch on the CPU, without the devices [ms]", ["", "then", "now"])
    now = _baselines(timed)
    for name in dict.fromkeys([CONVOLVE2D, *now]):
        before = amount(then.CONVOLVE2D_MS) if name == CONVOLVE2D else NONE
        rows.add(told(name), before, about(now[name].ms) if name in now else NONE)
    return rows.sheet()


def _baselines(timed: dict[int, dict[str, Timing]]) -> dict[str, Timing]:
    """By name, from the cell on the fewest devices."""
    found: dict[str, Timing] = {}
    for _, one in sorted(timed.items()):
        for name, timing in one.items():
            if timing.baseline:
                found.setdefault(name, timing)
    return found


def _problems(mine: Sequence[Result]) -> Sheet:
    """The guesses of the report: larger filters, more channels, the copy alone."""
    counts = device_counts(mine)
    heads = [
        "filter",
        "channels",
        "images",
        "what",
        *(f"{count(n, 'device')} [ms]" for n in counts),
    ]
    rows = Rows("Larger filters, more channels, and the copy alone", [*heads, "most / 1 device"])
    for width, channels, copied, images in dict.fromkeys(map(_posed, mine)):
        at = _by_devices([r for r in mine if _posed(r) == (width, channels, copied, images)])
        whole = {n: _whole(_timed(result)) for n, result in at.items()}
        what = "copy there and back" if copied else "end to end"
        entries = [_time(rows, at.get(n), whole.get(n)) for n in counts]
        rows.add(*map(told, (width, channels, images, what)), *entries, _gain(whole))
    return rows.sheet()


def _alike(found: Sequence[Result], plain: dict[int, Result]) -> list[Result]:
    """The cells that do the work of PyTorch's; all, where it has none."""
    known = {(result.cell.first.workload, result.batch) for result in plain.values()}
    return [r for r in found if not known or (r.cell.first.workload, r.batch) in known]


def _frameworks(compared: dict[str, dict[int, Result]]) -> Sheet:
    """The report's guess that another library is faster: the same parts in each."""
    counts = device_counts([result for cells in compared.values() for result in cells.values()])
    heads = ["framework", "part", *(f"{count(n, 'device')} [ms]" for n in counts)]
    rows = Rows("The same batch in other frameworks", heads)
    for name, cells in compared.items():
        timed = {n: _timed(result) for n, result in cells.items()}
        parts = dict.fromkeys(part for one in timed.values() for part in one)
        for part in (part for part in parts if part.startswith(COMPARED)):
            found = {n: one.get(part) for n, one in timed.items()}
            entries = [_time(rows, cells.get(n), found.get(n)) for n in counts]
            rows.add(told(name), told(part), *entries)
        if not parts:
            rows.add(told(name), BLANK, *(_time(rows, cells.get(n), None) for n in counts))
    return rows.sheet()


def _libraries(compared: dict[str, dict[int, Result]]) -> str:
    """The way end to end on the fewest devices that all frameworks have."""
    common = set[int].intersection(*map(set, compared.values()))
    if not common:
        return ""
    whole = {name: _whole(_timed(cells[min(common)])) for name, cells in compared.items()}
    said = [f"{number(way.ms.value)} ms in {name}" for name, way in whole.items() if way]
    fewest = count(min(common), "device")
    return f"End to end on {fewest} takes {listed(said)}." if len(said) > 1 else ""


def _time(rows: Rows, result: Result | None, whole: Timing | None) -> Entry:
    if result is not None and not result.ok:
        return rows.failed(result)
    return about(whole.ms) if whole else NONE


def _gain(whole: dict[int, Timing | None]) -> Entry:
    ratio = _ratio(whole)
    return NONE if ratio is None else Entry(text=times(ratio[1]), value=ratio[1])


def _ratio(whole: dict[int, Timing | None]) -> tuple[int, float] | None:
    """The most devices, and how many times as fast as one they are."""
    known = {n: timing.ms.value for n, timing in whole.items() if timing is not None}
    if 1 not in known or len(known) < 2:
        return None
    return max(known), known[1] / known[max(known)]


def _first(timed: dict[int, dict[str, Timing]]) -> str:
    """How far one timed call is from a later one."""
    pairs = [(n, one.get(FIRST), _whole(one)) for n, one in sorted(timed.items())]
    known = [(n, first.ms.value, later.ms.value) for n, first, later in pairs if first and later]
    if not known:
        return ""
    n, first, later = known[0]
    ratio = first / later
    verdict = ": one timed call measures the start" if ratio >= AT_LEAST else ""
    return (
        f"On {count(n, 'device')} the first call takes {number(first)} ms, {number(ratio)}× a "
        f"later one ({number(later)} ms){verdict}."
    )


def _scaling(timed: dict[int, dict[str, Timing]]) -> str:
    whole = _ratio({n: _whole(one) for n, one in timed.items()})
    if whole is None:
        return ""
    alone = _ratio({n: one.get("convolution, warm cache") for n, one in timed.items()})
    more = f", the convolution without its copies {times(alone[1])}" if alone else ""
    return f"{count(whole[0], 'device')} are {times(whole[1])} as fast as one end to end{more}."


def _copies(timed: dict[int, dict[str, Timing]]) -> str:
    """What part of the whole way a copy alone takes, on every number of devices."""
    shares = []
    for n, one in sorted(timed.items()):
        way = _whole(one)
        copy = way and one.get(way.part.replace(END_TO_END, COPY_ONLY))
        if way and copy:
            share = percent(copy.ms.value / way.ms.value)
            shares.append(f"{share} on {count(n, 'device')}")
    if not shares:
        return ""
    return f"A copy there and back alone takes {listed(shares)} of the time end to end."


def _peer(timed: dict[int, dict[str, Timing]]) -> str:
    peers, whole = _baselines(timed), timed.get(1) and _whole(timed[1])
    if not whole or not peers:
        return ""
    best = min(peers.values(), key=lambda timing: timing.ms.value)
    ratio = best.ms.value / whole.ms.value
    verdict = f"{number(ratio)}× as long as" if ratio >= 1 else f"{number(1 / ratio)}× less than"
    return f"{best.part} takes {number(best.ms.value)} ms, {verdict} one device end to end."


def _larger(mine: Sequence[Result]) -> str:
    """Whether more work a byte helps: the gain of the smallest problem and of the others."""
    gains = []
    for posed in dict.fromkeys(map(_posed, mine)):
        width, channels, copied, _ = posed
        at = _by_devices([r for r in mine if _posed(r) == posed])
        ratio = _ratio({n: _whole(_timed(result)) for n, result in at.items()})
        if ratio and not copied and (width, channels) != (3, 1):
            gains.append(f"{times(ratio[1])} at filter {width} and {count(channels, 'channel')}")
    return f"With more work per image the same ratio is {listed(gains)}." if gains else ""
