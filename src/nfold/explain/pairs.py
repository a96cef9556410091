"""Two causes at once: which can be taken away together, and what they hide of each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from nfold.explain.causes import CAUSES, Cause
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.rung import Trial
from nfold.explain.view import MetricView
from nfold.finding import Finding


@dataclass(frozen=True)
class CausePair:
    """Two causes that can both be taken away from the real run, each alone and together."""

    first: Cause
    second: Cause
    design: ExperimentDesign

    @property
    def trials(self) -> tuple[Trial, Trial, Trial, Trial]:
        """The real run; without the first, the second, and both."""
        left_out = (self.first.removal, self.second.removal)
        both = left_out[0].merge(left_out[1])
        without = (Trial(plan=self.design.plan, variant=one) for one in (*left_out, both))
        first, second, neither = without
        return (self.design.actual(), first, second, neither)

    def lost_ms(self, view: MetricView) -> float:
        """What both cost together beyond the sum of each alone."""
        real, first, second, neither = map(view.step, self.trials)
        return first + second - real - neither


def cause_pairs(design: ExperimentDesign, findings: Sequence[Finding]) -> Iterator[CausePair]:
    """Pairs of the three largest of these findings that can be taken away from the real run."""
    names = [row.cause for row in sorted(findings, key=lambda row: -row.lost_ms.value)]
    removable = [c for c in CAUSES if c.removal and c.removal.refusal(design.plan) is None]
    by_name = {cause.id: cause for cause in removable}
    largest = [by_name[name] for name in dict.fromkeys(names) if name in by_name][:3]
    for first, second in combinations(largest, 2):
        yield CausePair(first, second, design)
