"""How good a diagnosis is: attributed against injected milliseconds. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One explanation of a run with a known cost in it; all times in milliseconds a step.

    ``cause`` is empty for a healthy run. ``attributed_ms`` is what the injected cause's row says,
    ``named`` are the causes that are named, the largest first.
    """

    cause: str
    injected_ms: float
    attributed_ms: float
    step_ms: float
    unexplained_ms: float
    named: tuple[str, ...]


def slope(cases: Sequence[Case]) -> float | None:
    """Of attributed over injected, by least squares; None with fewer than two doses."""
    doses = [case.injected_ms for case in cases]
    if len(set(doses)) < 2:
        return None
    mean = sum(doses) / len(doses)
    found = sum(case.attributed_ms for case in cases) / len(cases)
    across = sum((c.injected_ms - mean) * (c.attributed_ms - found) for c in cases)
    return across / sum((dose - mean) ** 2 for dose in doses)


def error(cases: Sequence[Case]) -> float:
    """The mean of |attributed - injected| over the step."""
    return sum(abs(c.attributed_ms - c.injected_ms) / c.step_ms for c in cases) / len(cases)


def unexplained(cases: Sequence[Case]) -> float:
    """The mean of |unexplained| over the step."""
    return sum(abs(c.unexplained_ms) / c.step_ms for c in cases) / len(cases)


def confusion(cases: Sequence[Case]) -> Counter[tuple[str, str]]:
    """How often (injected, named first) came; ``nothing`` stands for neither."""
    pairs = [(c.cause or "nothing", (*c.named, "nothing")[0]) for c in cases]
    return Counter(pairs)


def right_first(cases: Sequence[Case], least: float = 0.05) -> float | None:
    """The part of injections of at least ``least`` of a step whose cause was named first."""
    sick = [c for c in cases if c.cause and c.injected_ms >= least * c.step_ms]
    if not sick:
        return None
    return sum(c.named[:1] == (c.cause,) for c in sick) / len(sick)


def table(cases: Sequence[Case]) -> list[str]:
    """Everything in Markdown."""
    lines = [
        "| cause | doses | slope | error / step | unexplained / step |",
        "|---|--:|--:|--:|--:|",
    ]
    for cause in dict.fromkeys(c.cause for c in cases if c.cause):
        own = [c for c in cases if c.cause == cause]
        found = slope(own)
        steep = "–" if found is None else f"{found:.3f}"
        parts = f"{error(own):.1%} | {unexplained(own):.1%}"
        lines.append(f"| {cause} | {len(own)} | {steep} | {parts} |")
    healthy = [c for c in cases if not c.cause]
    false = sum(bool(c.named) for c in healthy)
    first = right_first(cases)
    lines += ["", f"Healthy runs with a cause named: {false} of {len(healthy)}."]
    if first is not None:
        lines.append(f"Right cause first, from 5 % of a step on: {first:.0%}.")
    lines += ["", "| injected | named first | times |", "|---|---|--:|"]
    pairs = sorted(confusion(cases).items())
    return [*lines, *(f"| {was} | {said} | {count} |" for (was, said), count in pairs)]
