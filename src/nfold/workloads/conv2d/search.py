"""The choice between ways to convolve, by their time on the device. Any clock, any library."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

M = TypeVar("M")


@dataclass(frozen=True, kw_only=True)
class ConvCandidate(Generic[M]):
    """A way to convolve, and what tables call it."""

    name: str
    method: M


@dataclass(frozen=True, kw_only=True)
class FastestSearch(Generic[M]):
    """Finds the fastest candidate, once per problem: ``seconds`` runs and times one."""

    seconds: Callable[[M], float]
    cache: dict[Hashable, ConvCandidate[M]] = field(default_factory=dict)

    def choose(self, problem: Hashable, candidates: Sequence[ConvCandidate[M]]) -> ConvCandidate[M]:
        """The fastest for this problem; the first one where none is faster or all others fail."""
        if problem not in self.cache:
            self.cache[problem] = fastest(candidates, self.seconds)
        return self.cache[problem]


def fastest(
    candidates: Sequence[ConvCandidate[M]], seconds: Callable[[M], float]
) -> ConvCandidate[M]:
    """The candidate of the least time; the first one runs everywhere, and wins a tie.

    A candidate that raises is out: compilers differ in what they refuse. The first one's error
    is the caller's.
    """
    best, *others = candidates
    least = seconds(best.method) if others else 0.0
    for other in others:
        taken = _seconds_or_infinity(other, seconds)
        if taken < least:
            best, least = other, taken
    return best


def _seconds_or_infinity(candidate: ConvCandidate[M], seconds: Callable[[M], float]) -> float:
    try:
        return seconds(candidate.method)
    except Exception:
        return math.inf
