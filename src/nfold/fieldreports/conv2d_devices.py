"""Field report 1: one convolution on 1 to N devices, with every part timed."""

from __future__ import annotations

from collections.abc import Sequence

from nfold.analysis.comparison import CellResult
from nfold.analysis.part_timings import PartTiming, part_timings
from nfold.core.format import format_number, format_percent, format_ratio, join_words, pluralize
from nfold.fieldreports import sheets as sheets_module
from nfold.fieldreports.sheets import (
    BLANK_ENTRY,
    FieldReport,
    Sheet,
    SheetBuilder,
    SheetEntry,
    device_counts,
    interval_entry,
    number_entry,
    select_workloads,
)

END_TO_END, COPY_ONLY, FIRST_CALL = "end to end", "copy only", "first call"
CONVOLVE2D = "scipy.signal.convolve2d, 1 core"
DEFAULTS = {"filter": 3, "channels": 1, "copy_only": 0}
TORCH, OTHER_FRAMEWORKS = "torch", ("tensorflow", "jax")
# parts, or beginnings of their names, that are compared between frameworks
COMPARED_PARTS = (FIRST_CALL, COPY_ONLY, END_TO_END, "convolution, warm cache", "resident loop")
FIRST_CALL_RATIO = 2.0  # from this ratio on, a single timed call mostly measures the start


def conv2d_report(found: Sequence[CellResult]) -> FieldReport:
    """Build the published table, the parts, the CPU baselines and the larger filters."""
    cells_of_conv2d = select_workloads(found, "conv2d")
    torch_cells = _of(cells_of_conv2d, TORCH)
    published = _published_problem(torch_cells)
    others = {
        name: _published_problem(_same_problem(_of(cells_of_conv2d, name), published))
        for name in OTHER_FRAMEWORKS
    }
    timed = {devices: _timed(result) for devices, result in published.items()}
    sentences = [
        _first_call_sentence(timed),
        _scaling(timed),
        _copy_sentence(timed),
        _peer(timed),
        _larger_problem_sentence(torch_cells),
    ]
    compared = {name: cells for name, cells in {TORCH: published, **others}.items() if cells}
    sheets = [_parts(published, timed), _cpu(timed), _problems(torch_cells)]
    if compared.keys() - {TORCH}:
        sentences.append(_libraries(compared))
        sheets.append(_frameworks(compared))
    return FieldReport(
        name="conv2d-devices",
        title="One convolution on 1 to N devices, with every part timed",
        published_setup=sheets_module.CONV2D_SETUP,
        sentences=tuple(sentence for sentence in sentences if sentence),
        sheets=tuple(sheets),
    )


def _of(found: Sequence[CellResult], framework: str) -> list[CellResult]:
    if framework == TORCH:
        return [result for result in found if result.plan.framework not in OTHER_FRAMEWORKS]
    return [result for result in found if result.plan.framework == framework]


def _published_problem(found: Sequence[CellResult]) -> dict[int, CellResult]:
    alike = [r for r in found if _problem(r) == tuple(DEFAULTS.values())]
    return _by_devices([r for r in alike if r.batch == max(one.batch for one in alike)])


def _problem(result: CellResult) -> tuple[int, ...]:
    chosen = dict(result.cell.first.workload.parameters)
    return tuple(chosen.get(name, default) for name, default in DEFAULTS.items())


def _by_devices(found: Sequence[CellResult]) -> dict[int, CellResult]:
    def rate(result: CellResult) -> float:
        return result.samples_per_s.value if result.samples_per_s else 0.0

    ordered = sorted(found, key=lambda r: (r.devices, rate(r)))
    return {result.devices: result for result in ordered}


def _timed(result: CellResult) -> dict[str, PartTiming]:
    return {timing.part: timing for timing in part_timings([result])}


def _fastest_end_to_end(timed: dict[str, PartTiming]) -> PartTiming | None:
    for begin in (END_TO_END, COPY_ONLY):
        ways = [timing for name, timing in timed.items() if name.startswith(begin)]
        if ways:
            return min(ways, key=lambda timing: timing.ms.value)
    return None


def _parts(published: dict[int, CellResult], timed: dict[int, dict[str, PartTiming]]) -> Sheet:
    reported = range(1, 1 + len(sheets_module.CONV2D_MS["V100"]))
    counts = sorted({*reported, *published})
    rows = SheetBuilder("The whole batch by number of devices [ms]", ["devices", *map(str, counts)])
    for card, values in sheets_module.CONV2D_MS.items():
        known = dict(zip(reported, values, strict=True))
        rows.add(f"then: {card}, one call", *(number_entry(known.get(n)) for n in counts))
    failed = {n: result for n, result in published.items() if not result.succeeded}
    names = dict.fromkeys(n for one in timed.values() for n, t in one.items() if not t.baseline)
    for name in names:
        found = {n: one[name] for n, one in timed.items() if name in one}
        rows.add(f"now: {name}", *(_milliseconds(found.get(n)) for n in counts))
    if failed:
        entries = [rows.failure_entry(failed[n]) if n in failed else BLANK_ENTRY for n in counts]
        rows.add("now: no result", *entries)
    return rows.build()


def _cpu(timed: dict[int, dict[str, PartTiming]]) -> Sheet:
    rows = SheetBuilder("The batch on the CPU, without the devices [ms]", ["", "then", "now"])
    now = _baselines(timed)
    for name in dict.fromkeys([CONVOLVE2D, *now]):
        before = sheets_module.CONVOLVE2D_MS if name == CONVOLVE2D else None
        rows.add(name, number_entry(before), _milliseconds(now.get(name)))
    return rows.build()


def _baselines(timed: dict[int, dict[str, PartTiming]]) -> dict[str, PartTiming]:
    found: dict[str, PartTiming] = {}
    for _, one in sorted(timed.items()):
        for name, timing in one.items():
            if timing.baseline:
                found.setdefault(name, timing)
    return found


def _problems(torch_cells: Sequence[CellResult]) -> Sheet:
    counts = device_counts(torch_cells)
    heads = ["filter", "channels", "images", "what", *_in_ms(counts), "most / 1 device"]
    rows = SheetBuilder("Larger filters, more channels, and copies only", heads)
    for (width, channels, copied, images), at in _by_problem(torch_cells).items():
        whole = {n: _fastest_end_to_end(_timed(result)) for n, result in at.items()}
        what = "copy there and back" if copied else "end to end"
        entries = [_time(rows, at.get(n), whole.get(n)) for n in counts]
        ratio = _ratio(whole)
        gain = number_entry(ratio and ratio[1], format_ratio)
        rows.add(width, channels, images, what, *entries, gain)
    return rows.build()


def _in_ms(counts: Sequence[int]) -> list[str]:
    return [f"{pluralize(n, 'device')} [ms]" for n in counts]


def _by_problem(torch_cells: Sequence[CellResult]) -> dict[tuple[int, ...], dict[int, CellResult]]:
    alike: dict[tuple[int, ...], list[CellResult]] = {}
    for result in torch_cells:
        alike.setdefault((*_problem(result), result.batch), []).append(result)
    return {problem: _by_devices(results) for problem, results in alike.items()}


def _same_problem(
    found: Sequence[CellResult], published: dict[int, CellResult]
) -> list[CellResult]:
    known = {(result.cell.first.workload, result.batch) for result in published.values()}
    return [r for r in found if not known or (r.cell.first.workload, r.batch) in known]


def _frameworks(compared: dict[str, dict[int, CellResult]]) -> Sheet:
    counts = device_counts([result for cells in compared.values() for result in cells.values()])
    rows = SheetBuilder(
        "The same batch in other frameworks", ["framework", "part", *_in_ms(counts)]
    )
    for name, cells in compared.items():
        timed = {n: _timed(result) for n, result in cells.items()}
        parts = dict.fromkeys(part for one in timed.values() for part in one)
        for part in (part for part in parts if part.startswith(COMPARED_PARTS)):
            found = {n: one.get(part) for n, one in timed.items()}
            entries = [_time(rows, cells.get(n), found.get(n)) for n in counts]
            rows.add(name, part, *entries)
        if not parts:
            rows.add(name, "", *(_time(rows, cells.get(n), None) for n in counts))
    return rows.build()


def _libraries(compared: dict[str, dict[int, CellResult]]) -> str:
    common = set[int].intersection(*map(set, compared.values()))
    if not common:
        return ""
    whole = {
        name: _fastest_end_to_end(_timed(cells[min(common)])) for name, cells in compared.items()
    }
    times = [f"{format_number(way.ms.value)} ms in {name}" for name, way in whole.items() if way]
    fewest = pluralize(min(common), "device")
    return f"End to end on {fewest} takes {join_words(times)}." if len(times) > 1 else ""


def _time(rows: SheetBuilder, result: CellResult | None, whole: PartTiming | None) -> SheetEntry:
    if result is not None and not result.succeeded:
        return rows.failure_entry(result)
    return _milliseconds(whole)


def _milliseconds(timing: PartTiming | None) -> SheetEntry:
    return interval_entry(timing.ms if timing else None)


def _ratio(whole: dict[int, PartTiming | None]) -> tuple[int, float] | None:
    known = {n: timing.ms.value for n, timing in whole.items() if timing is not None}
    if 1 not in known or len(known) < 2:
        return None
    return max(known), known[1] / known[max(known)]


def _first_call_sentence(timed: dict[int, dict[str, PartTiming]]) -> str:
    pairs = [(n, one.get(FIRST_CALL), _fastest_end_to_end(one)) for n, one in sorted(timed.items())]
    known = [(n, first.ms.value, later.ms.value) for n, first, later in pairs if first and later]
    if not known:
        return ""
    n, first, later = known[0]
    ratio = first / later
    verdict = "; a single timed call mostly measures the start" if ratio >= FIRST_CALL_RATIO else ""
    return (
        f"On {pluralize(n, 'device')} the first call takes {format_number(first)} ms, "
        f"{format_number(ratio)}× a later one ({format_number(later)} ms){verdict}."
    )


def _scaling(timed: dict[int, dict[str, PartTiming]]) -> str:
    whole = _ratio({n: _fastest_end_to_end(one) for n, one in timed.items()})
    if whole is None:
        return ""
    convolution = _ratio({n: one.get("convolution, warm cache") for n, one in timed.items()})
    more = ""
    if convolution is not None:
        more = f", the convolution without its copies {format_ratio(convolution[1])}"
    devices, ratio = pluralize(whole[0], "device"), format_ratio(whole[1])
    return f"{devices} are {ratio} as fast as one end to end{more}."


def _copy_sentence(timed: dict[int, dict[str, PartTiming]]) -> str:
    shares = []
    for n, one in sorted(timed.items()):
        way = _fastest_end_to_end(one)
        copy = way and one.get(way.part.replace(END_TO_END, COPY_ONLY))
        if way and copy:
            share = format_percent(copy.ms.value / way.ms.value)
            shares.append(f"{share} on {pluralize(n, 'device')}")
    if not shares:
        return ""
    return f"Copying to the device and back takes {join_words(shares)} of the time end to end."


def _peer(timed: dict[int, dict[str, PartTiming]]) -> str:
    peers, whole = _baselines(timed), timed.get(1) and _fastest_end_to_end(timed[1])
    if not whole or not peers:
        return ""
    best = min(peers.values(), key=lambda timing: timing.ms.value)
    ratio = best.ms.value / whole.ms.value
    times = f"{format_number(ratio)}×" if ratio >= 1 else format_ratio(ratio)
    return (
        f"{best.part} takes {format_number(best.ms.value)} ms, {times} the time of one device "
        "end to end."
    )


def _larger_problem_sentence(torch_cells: Sequence[CellResult]) -> str:
    gains = []
    for (width, channels, copied, _), at in _by_problem(torch_cells).items():
        ratio = _ratio({n: _fastest_end_to_end(_timed(result)) for n, result in at.items()})
        if ratio and not copied and (width, channels) != (3, 1):
            gains.append(
                f"{format_ratio(ratio[1])} at filter {width} and {pluralize(channels, 'channel')}"
            )
    return f"With more work per image the ratio is {join_words(gains)}." if gains else ""
