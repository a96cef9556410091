"""The screen of ``nfold tune``: conclusion, what was kept, what did not help, the files."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nfold.cli import terminal
from nfold.cli.progress import format_short_duration
from nfold.cli.terminal import Line, PlainScreen, wrap_lines
from nfold.core.format import (
    format_parenthesized_range,
    format_percent,
    format_ratio_interval,
    pluralize,
    terminal_safe,
)
from nfold.explain.result.budget import Budget
from nfold.tune.remedies import Remedy, largest_change
from nfold.tune.result import Tried, TuneResult
from nfold.tune.runs.fresh_runs import TuneEvents
from nfold.tune.waterfall import kept_groups

MAX_KEPT, MAX_OTHERS = 8, 6
MAX_REASON = 160
NUMERICS_TEXT = {
    "same": "training unchanged",
    "rounding": "training unchanged within rounding",
    "training": "training changed as allowed",
}


class TuneProgress(TuneEvents):
    """Prints a line per decision, and a live line with the time left."""

    def __init__(self, screen: PlainScreen) -> None:
        self._screen = screen

    def explaining(self, kept: Sequence[Remedy], remaining_s: float) -> None:  # type: ignore[override]
        what = "explaining what is left" if kept else "explaining"
        self._screen.print_line(f"{what} ({format_short_duration(remaining_s)} left)")

    def explained(self, budget: Budget) -> None:
        costs = budget.account.costs[:3] if budget.account is not None else ()
        step_ms = budget.n_devices.step_ms.value
        found = ", ".join(f"{row.label} {format_percent(row.ms.value / step_ms)}" for row in costs)
        self._screen.print_line(f"a step of {step_ms:.4g} ms: {found or 'no cost above the noise'}")

    def trying(self, what: str, remaining_s: float) -> None:
        self._screen.show_live(f"{what} · {format_short_duration(remaining_s)} left")

    def decided(self, tried: Tried) -> None:
        self._screen.print_line(terminal_safe(describe_tried(tried)))

    def verifying(self, remaining_s: float) -> None:
        left = format_short_duration(remaining_s)
        self._screen.print_line(
            f"comparing the original with the result in fresh runs ({left} left)"
        )


def describe_tried(tried: Tried) -> str:
    """``num_workers=4: kept, 1.52 × (1.48 to 1.56)``."""
    text = f"{tried.remedy.label}: {tried.outcome}"
    if tried.gain is not None:
        text += f", {format_ratio_interval(tried.gain)}"
    reason = tried.reason
    if len(reason) > MAX_REASON:  # an error message of several sentences
        reason = f"{reason[:MAX_REASON].rpartition(' ')[0]} …; --json has all"
    return f"{text} ({reason})" if reason else text


def print_result(result: TuneResult, files: dict[str, str], *, plain: bool = False) -> None:
    """Print the conclusion in at most 25 lines; ``files`` are paths by kind."""
    terminal.print_lines(lambda width: result_lines(result, files, width), plain=plain)


def result_lines(result: TuneResult, files: dict[str, str], width: int) -> list[Line]:
    lines = _wrapped(conclusion(result), width, "bold")
    groups = kept_groups(result)
    kept = [one for group in groups for one in group]
    if kept:
        lines += [("", ""), (f"kept ({result.losses}):", "")]
        texts = [text for group in groups for text in _kept_lines(group)]
        for text in texts[:MAX_KEPT]:
            lines += _wrapped(text, width)
        if len(texts) > MAX_KEPT:
            lines.append((_and_others(len(texts) - MAX_KEPT), "dim"))
    others = [one for one in result.tried if one not in kept]
    others.sort(key=lambda one: (one.outcome in ("refused", "not tried"), one.outcome))
    if others:
        lines += [("", ""), ("tried and not kept:", "")]
        for one in others[:MAX_OTHERS]:
            lines += _wrapped(f"  {describe_tried(one)}", width, "dim")
        if len(others) > MAX_OTHERS:
            lines.append((_and_others(len(others) - MAX_OTHERS), "dim"))
    if files:
        lines.append(("", ""))
    if "toml" in files:
        lines += _wrapped(
            f"{files['toml']}: nfold run --with {files['toml']} {result.target}", width
        )
    if "patch" in files and "applied to" not in files:
        lines += _wrapped(f"{files['patch']}: git apply {files['patch']}", width)
    for kind, text in files.items():
        if kind not in ("toml", "patch"):
            lines += _wrapped(f"{kind}: {text}", width)
    return lines


def _kept_lines(group: Sequence[Tried]) -> list[str]:
    """Return a line per remedy; those that were measured together have one gain, in a line above."""
    first, gain = group[0], group[0].gain
    shown = "" if gain is None else format_ratio_interval(gain)
    if len(group) == 1:
        return [f"  {first.remedy.label:<28} {shown:<20}{_reason(first)}".rstrip()]
    names = [f"    {one.remedy.label:<26} {_reason(one)}".rstrip() for one in group]
    return [f"  {'together':<28} {shown}", *names]


def _reason(one: Tried) -> str:
    return f"  {one.remedy.reason}" if one.remedy.reason != "standard" else ""


def _and_others(count: int) -> str:
    return f"  and {pluralize(count, 'other')}: --json has all"


def conclusion(result: TuneResult) -> str:
    """``train.py on 2 devices: 1.93 × faster (1.88 to 1.97), verified in 3 pairs of fresh runs; …``."""
    where = f"{terminal_safe(result.target)} on {pluralize(result.devices, 'device')}"
    verified = result.verification
    if not result.kept:
        if result.stopped:
            return f"{where}: stopped before anything was kept"
        untried = sum(one.lacked_time for one in result.tried)
        if untried:
            minutes = math.ceil(result.sufficient_s / 60)
            return f"{where}: nothing kept, {untried} not tried in time; next: --budget {minutes}m"
        return f"{where}: nothing helps beyond 1 %"
    if verified.objection is not None:
        return f"{where}: not verified: {verified.objection}; nothing was written"
    if not result.is_verified:
        gain = f" ({format_ratio_interval(verified.gain)})" if verified.gain is not None else ""
        why = "stopped before it" if result.stopped and not verified.pairs else "fresh runs"
        return f"{where}: not verified by {why}{gain}; nothing was written"
    assert verified.gain is not None
    spread = format_parenthesized_range(verified.gain, "{:.2f}")
    return (
        f"{where}: {verified.gain.value:.2f} × faster{spread}, verified in {verified.pairs} "
        f"pairs of fresh runs; {NUMERICS_TEXT[largest_change(result.kept)]}"
    )


def _wrapped(text: str, width: int, style: str = "") -> list[Line]:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return wrap_lines(text, width, style, indent)
