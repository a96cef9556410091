"""The page of ``nfold tune`` from a result: bars, tables and notes."""

from __future__ import annotations

from nfold.cli.tune_screen import conclusion
from nfold.core.format import format_ratio_interval
from nfold.explain.result.view import format_ms, format_percent
from nfold.report.explanation import DetailTable
from nfold.report.tune_content import TuneBar, TunePageContent
from nfold.tune.result import TuneResult
from nfold.tune.waterfall import WaterfallBar, waterfall_bars


def page_content(result: TuneResult, files: dict[str, str]) -> TunePageContent:
    """Return what the page shows; ``files`` are paths by kind."""
    bars = waterfall_bars(result)
    return TunePageContent(
        target=result.target,
        headline=conclusion(result),
        bars=tuple(_page_bar(bar, bars[0].end_ms) for bar in bars),
        tables=tuple(table for table in (_tried(result),) if table.rows),
        notes=tuple(f"{kind}: {text}" for kind, text in files.items()),
    )


def _page_bar(bar: WaterfallBar, original_ms: float) -> TuneBar:
    low = high = bar.end_ms
    if bar.gain is not None:
        text = format_ratio_interval(bar.gain)
        low = bar.start_ms / (bar.gain.high or bar.gain.value)
        high = bar.start_ms / (bar.gain.low or bar.gain.value)
    elif bar.kind == "step":
        text = f"{format_ms(bar.end_ms)} ms"
    else:
        change = bar.end_ms - bar.start_ms
        text = f"{format_ms(abs(change))} ms, {format_percent(abs(change) / original_ms)}"
    return TuneBar(
        label=bar.label,
        kind=bar.kind,
        start=bar.start_ms,
        end=bar.end_ms,
        low=low,
        high=high,
        text=text,
    )


def _tried(result: TuneResult) -> DetailTable:
    rows = [
        (
            one.remedy.label,
            one.outcome,
            format_ratio_interval(one.gain) if one.gain is not None else "",
            one.remedy.numerics,
            one.reason or one.remedy.reason,
        )
        for one in sorted(result.tried, key=lambda one: one.remedy not in result.kept)
    ]
    heads = ("remedy", "outcome", "gain", "numerics", "reason")
    return DetailTable(title="Tried", heads=heads, rows=tuple(rows), numeric=frozenset({2}))
