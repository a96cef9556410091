"""Two causes at once: which can be taken away together, and what they hide of each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from nfold.explain.causes import CAUSES, Cause
from nfold.explain.ladder import Ladder
from nfold.explain.rung import Rung
from nfold.explain.view import View
from nfold.finding import Finding


@dataclass(frozen=True)
class Pair:
    """Two causes that can both be taken away from the real run, each alone and together."""

    first: Cause
    second: Cause
    ladder: Ladder

    @property
    def rungs(self) -> tuple[Rung, Rung, Rung, Rung]:
        """The real run; without the first, the second, and both."""
        left_out = (self.first.removal, self.second.removal)
        both = left_out[0].merged(left_out[1])
        without = (Rung(plan=self.ladder.plan, ablation=one) for one in (*left_out, both))
        first, second, neither = without
        return (self.ladder.full(), first, second, neither)

    def lost_ms(self, view: View) -> float:
        """What both cost together beyond the sum of each alone."""
        real, first, second, neither = map(view.step, self.rungs)
        return first + second - real - neither


def pairs(ladder: Ladder, findings: Sequence[Finding]) -> Iterator[Pair]:
    """Pairs of the three largest of these findings that can be taken away from the real run."""
    names = [row.cause for row in sorted(findings, key=lambda row: -row.lost_ms.value)]
    removable = [c for c in CAUSES if c.removal and c.removal.refusal(ladder.plan) is None]
    by_name = {cause.id: cause for cause in removable}
    largest = [by_name[name] for name in dict.fromkeys(names) if name in by_name][:3]
    for first, second in combinations(largest, 2):
        yield Pair(first, second, ladder)
