"""How good a diagnosis is: attributed against injected milliseconds. Pure functions."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NOTHING = "nothing"
LEAST = 0.05
"""The part of a step from which on an injected cause has to be named first."""
Point = tuple[float, float]
"""Injected and attributed milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One explanation of a run with known costs in it; all times in milliseconds a step.

    ``injected`` is empty for a healthy run, has two causes for a pair, and 0 for a dose that
    something else hides. ``attributed`` is what the rows of the injected causes say, of a healthy
    run what all rows say, without those that there was no time to test, and
    ``interaction_ms`` what they share. ``others_ms`` is in rows without a name. ``named`` are the
    causes that are named, the largest first. ``predicted`` is the speedup that is promised
    without the injected cause. ``said`` is a tool's verdict in its own words.
    """

    target: str
    injected: Mapping[str, float]
    attributed: Mapping[str, float]
    step_ms: float
    unexplained_ms: float
    named: tuple[str, ...]
    tool: str = "nfold"
    interaction_ms: float = 0.0
    others_ms: float = 0.0
    speedup: float | None = None
    predicted: float | None = None
    said: str = ""

    @property
    def label(self) -> str:
        """The causes that were injected, ``nothing`` for none."""
        return " + ".join(self.injected) or NOTHING

    @property
    def answered(self) -> bool:
        """Whether every injected cause was tested."""
        return set(self.injected) <= set(self.attributed)

    @property
    def point(self) -> Point:
        """All that was injected against all that was found of it."""
        return sum(self.injected.values()), sum(self.attributed.values()) + self.interaction_ms


def slope(points: Sequence[Point]) -> float | None:
    """Of attributed over injected, by least squares; None with fewer than two doses."""
    if len({injected for injected, _ in points}) < 2:
        return None
    mean = statistics.fmean(injected for injected, _ in points)
    found = statistics.fmean(attributed for _, attributed in points)
    across = sum((injected - mean) * (attributed - found) for injected, attributed in points)
    return across / sum((injected - mean) ** 2 for injected, _ in points)


def without_own(cases: Sequence[Case]) -> list[Case]:
    """The cases with injections, less what the same target loses to these causes by itself.

    That is the median over its healthy runs, of each cause.
    """
    own: dict[tuple[str, str], list[float]] = {}
    for case in cases:
        for cause, lost in case.attributed.items() if not case.injected else ():
            own.setdefault((case.target, cause), []).append(lost)
    usual = {key: statistics.median(lost) for key, lost in own.items()}
    return [
        dataclasses.replace(
            case,
            attributed={
                cause: lost - usual.get((case.target, cause), 0.0)
                for cause, lost in case.attributed.items()
            },
        )
        for case in cases
        if case.injected
    ]


def error(cases: Sequence[Case]) -> float:
    """The mean of |attributed - injected| over the step."""
    return statistics.fmean(abs(c.point[1] - c.point[0]) / c.step_ms for c in cases)


def unexplained(cases: Sequence[Case]) -> float:
    """The mean of |unexplained| over the step."""
    return statistics.fmean(abs(c.unexplained_ms) / c.step_ms for c in cases)


def others(cases: Sequence[Case]) -> float:
    """The mean of what rows without a name hold, losses or gains, over the step."""
    return statistics.fmean(abs(c.others_ms) / c.step_ms for c in cases)


def confusion(cases: Sequence[Case]) -> Counter[tuple[str, str]]:
    """How often (injected, named first) came; ``nothing`` stands for neither."""
    return Counter((c.label, (*c.named, NOTHING)[0]) for c in cases)


def sick(cases: Sequence[Case]) -> list[Case]:
    """Those whose injections are large enough to be named first."""
    return [c for c in cases if c.injected and c.point[0] >= LEAST * c.step_ms]


def right_first(cases: Sequence[Case]) -> float | None:
    """The part of large injections whose cause, or one of whose two, was named first."""
    large = sick(cases)
    if not large:
        return None
    return sum(bool(c.named) and c.named[0] in c.injected for c in large) / len(large)


def both_first(cases: Sequence[Case]) -> float | None:
    """The part of large pairs whose two causes were the first two."""
    pairs = [c for c in sick(cases) if len(c.injected) == 2]
    if not pairs:
        return None
    return sum(set(c.named[:2]) == set(c.injected) for c in pairs) / len(pairs)


def gains(cases: Sequence[Case]) -> list[tuple[Case, float]]:
    """Single injections with a promise, and the speedup once each is gone: of healthy runs."""
    healthy: dict[str, list[float]] = {}
    for case in cases:
        if not case.injected and case.speedup is not None:
            healthy.setdefault(case.target, []).append(case.speedup)
    return [
        (case, statistics.median(healthy[case.target]))
        for case in cases
        if len(case.injected) == 1 and case.predicted is not None and case.target in healthy
    ]


def table(cases: Sequence[Case]) -> list[str]:
    """Everything in Markdown: what nfold measured, then what every tool named."""
    own = [c for c in cases if c.tool == "nfold"]
    lines = [*_sizes(own), "", *_promises(own)] if own else []
    for tool in dict.fromkeys(c.tool for c in cases):
        lines += ["", *_names(tool, [c for c in cases if c.tool == tool])]
    return [*lines, *_verdicts(cases)]


def _sizes(cases: Sequence[Case]) -> list[str]:
    lines = [
        "| cause | doses | slope | error / step | other rows / step | unexplained / step |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    injected = [c for c in without_own(cases) if c.answered]
    for label in dict.fromkeys(c.label for c in injected):
        lines.append(_size(label, [c for c in injected if c.label == label]))
    lines += [_size("all", injected)] if injected else []
    silent = sum(not c.answered for c in cases)
    return [*lines, "", f"Not tested: {silent} of {len(cases)}."] if silent else lines


def _size(label: str, cases: Sequence[Case]) -> str:
    steep = slope([c.point for c in cases])
    text = "–" if steep is None else f"{steep:.3f}"
    parts = (error(cases), others(cases), unexplained(cases))
    return f"| {label} | {len(cases)} | {text} | {' | '.join(f'{part:.1%}' for part in parts)} |"


def _promises(cases: Sequence[Case]) -> list[str]:
    found = gains(cases)
    if not found:
        return []
    off = statistics.fmean(abs((case.predicted or 0) / got - 1) for case, got in found)
    return [
        f"Speedup without the cause, predicted against that of healthy runs: {off:.1%} apart on "
        f"average over {len(found)}."
    ]


def _names(tool: str, cases: Sequence[Case]) -> list[str]:
    healthy = [c for c in cases if not c.injected]
    false = sum(bool(c.named) for c in healthy)
    lines = [f"{tool}: healthy runs with a cause named: {false} of {len(healthy)}."]
    first, both = right_first(cases), both_first(cases)
    if first is not None:
        large = len(sick(cases))
        lines.append(f"Right cause first, from {LEAST:.0%} of a step on: {first:.0%} of {large}.")
    if both is not None:
        lines.append(f"Both causes of a pair first: {both:.0%}.")
    lines += ["", "| injected | named first | times |", "|---|---|--:|"]
    pairs = sorted(confusion(cases).items())
    return [*lines, *(f"| {was} | {said} | {count} |" for (was, said), count in pairs)]


def _verdicts(cases: Sequence[Case]) -> list[str]:
    """What other tools said, word for word."""
    said = [c for c in cases if c.said]
    if not said:
        return []
    lines = ["", "| target | injected | tool | it said |", "|---|---|---|---|"]
    return [*lines, *(f"| {c.target} | {_dosed(c)} | {c.tool} | {c.said} |" for c in said)]


def _dosed(case: Case) -> str:
    doses = (f"{cause} {dose:.1f} ms" for cause, dose in case.injected.items())
    return " + ".join(doses) or NOTHING
