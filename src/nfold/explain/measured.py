"""What has been measured so far: every rung with its runs, and why others have none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from nfold.explain.cycles import Swing, swing, together, trend
from nfold.explain.fit import RESAMPLES, Fit
from nfold.explain.passes import as_long_for_all
from nfold.explain.polish import Key, Run
from nfold.explain.readings import crowded, readings, scatter
from nfold.explain.recurring import Recurring, again, between, recurring, without
from nfold.explain.rung import Rung
from nfold.finding import NO_TIME
from nfold.measurement import Cause, Doubt, Measurement
from nfold.run.verdict import OWN_WORK

LONGER = "; next: a larger --budget"
UNSTEADY = 1.15
"""The longest turn over the shortest. On steady hosts it is 1.01 to 1.10, on two where process
trees of one kind differed by a fifth and more 1.22 and 1.75.
"""
CHANGING = 1.3
"""The last turn over the first, or the first over the last, of steps that grow or shrink in each:
of four turns one in twelve does so by chance, hardly by as much.
"""


Varied = Literal["unsteady", "changing_batches"]
"""Kinds of doubts."""


@dataclass
class Measured:
    """Runs by rung and round; ``reasons`` of rungs that cannot be run, or could not.

    ``stalled_s`` are seconds without a step after one, in runs that were ended then.
    """

    runs: dict[Rung, dict[int, Measurement]] = field(default_factory=dict)
    reasons: dict[Rung, str] = field(default_factory=dict)
    stalled_s: dict[Rung, float] = field(default_factory=dict)

    def add(self, rung: Rung, number: int, measurement: Measurement) -> None:
        """Keep a run, passes as long for all; one that failed is the reason why its rung is not
        asked again.
        """
        if measurement.status == "ok":
            self.runs.setdefault(rung, {})[number] = as_long_for_all(measurement)
            return
        self.reasons[rung] = reason_of(measurement)
        cause = measurement.cause
        if cause is not None and cause.step and cause.stalled_s:
            self.stalled_s[rung] = cause.stalled_s

    def rounds(self, rung: Rung) -> int:
        """How often a rung was run."""
        return len(self.runs.get(rung, {}))

    def tried(self, rung: Rung) -> bool:
        """Whether it has a run, or a reason why not."""
        return rung in self.runs or rung in self.reasons

    def done(self, rung: Rung, number: int) -> bool:
        """Whether it has a run in this round, or a reason why it has none in any."""
        return rung in self.reasons or number in self.runs.get(rung, {})

    def has(self, rungs: Iterable[Rung]) -> bool:
        """Whether every one of these was run."""
        return all(rung in self.runs for rung in rungs)

    def missing(self, rungs: Iterable[Rung]) -> str | None:
        """Why the first of these that has no run has none; None where all have."""
        for rung in rungs:
            if rung not in self.runs:
                return self.reasons.get(rung, NO_TIME)
        return None

    def ids(self, rungs: Iterable[Rung]) -> tuple[str, ...]:
        """The runs of these rungs."""
        found = [m.id for rung in rungs for m in self.runs.get(rung, {}).values()]
        return tuple(dict.fromkeys(found))

    def doubts(self) -> tuple[Doubt, ...]:
        """The first doubt of every kind."""
        found = [doubt for m in self.every() for doubt in m.warnings]
        return tuple({doubt.kind: doubt for doubt in reversed(found)}.values())

    def cut_short(self) -> Iterator[tuple[int, str, Cause | None]]:
        """Timed steps of runs that have fewer than they should, what was run, and what ended it.

        Passes that nfold cut short may be fewer on purpose, and an operation notes no steps.
        """
        for one in self.every():
            cut = one.ablation is not None and one.ablation.pass_batches is not None
            timed = min((len(rank.step_ms) for rank in one.ranks), default=0)
            if not cut and 0 < timed < (one.plan.steps or 0):
                yield timed, one.workload.name, one.cause

    def seconds(self, rungs: Collection[Rung]) -> float:
        """How long a run of these that share it takes: as one of them did, or one of as many.

        Where none was of so few, the longest of the next more, less what it timed of the others.
        """
        own = [m.wall_seconds for rung in rungs for m in self.runs.get(rung, {}).values()]
        if own:
            return max(own)
        sizes = Counter(m.folder or m.id for m in self.every())
        walls = [(sizes[m.folder or m.id], m.wall_seconds, _timed_s(m)) for m in self.every()]
        nearest = min((abs(size - len(rungs)) for size, _, _ in walls), default=0)
        found = [
            wall - max(0, size - len(rungs)) * timed
            for size, wall, timed in walls
            if abs(size - len(rungs)) == nearest
        ]
        return max(found, default=0.0)

    def fit(self, resamples: int = RESAMPLES, *, final: bool = True) -> Fit:
        """The values of all readings; ``final`` where nothing more will be measured."""
        table: dict[Key, dict[int, float]] = {}
        shared: dict[Run, str] = {}
        inside: dict[Run, float] = {}
        scatters: list[tuple[Rung, float]] = []
        trees = [*self._trees()]
        apart = [recurring(members) for _, _, members in trees]
        every = [one for of_tree in apart for one in of_tree.values()]
        for (folder, number, members), of_tree in zip(trees, apart, strict=True):
            usual = _usual(members, of_tree)
            if len(members) > 1:
                found, errors = together(usual)
                inside |= {(rung, number): error for rung, error in errors.items()}
                shared |= {(rung, number): folder for rung in members}
            else:
                found = {r: readings(m, coupled=r.coupled) for r, m in usual.items()}
            for rung, named in found.items():
                recurs = of_tree.get(rung)
                more = {**again(recurs, every), **between(members[rung], recurs)}
                for name, value in {**named, **more}.items():
                    table.setdefault((rung, name), {})[number] = value
            scatters += [(rung, max(scatter(m), crowded(m))) for rung, m in usual.items()]
        ahead = [rung for rung in self.runs if _ahead(rung, table)]
        failed = [rung for rung in self.reasons if rung not in self.runs]
        return Fit(
            table, scatters, resamples, shared, inside, final=final, ahead=ahead, failed=failed
        )

    def varied(self) -> dict[Varied, Swing]:
        """What a step varied by most in its turns, where that is much.

        ``unsteady``: though nothing differed; ``changing_batches``: from what to what those of the
        real run went by their batches.
        """
        trees = [members for _, _, members in self._trees() if len(members) > 1]
        in_turns = [_usual(members, recurring(members)) for members in trees]
        found: dict[Varied, Swing | None] = {
            "unsteady": _most(map(swing, in_turns), UNSTEADY),
            "changing_batches": _most(map(trend, in_turns), CHANGING),
        }
        return {kind: most for kind, most in found.items() if most is not None}

    def _trees(self) -> Iterator[tuple[str, int, dict[Rung, Measurement]]]:
        """Every process tree: its folder, its round, and what had a turn in it."""
        found: dict[tuple[str, int], dict[Rung, Measurement]] = {}
        for rung, runs in self.runs.items():
            for number, measurement in runs.items():
                tree = (measurement.folder or measurement.id, number)
                found.setdefault(tree, {})[rung] = measurement
        return ((folder, number, members) for (folder, number), members in found.items())

    def every(self) -> Iterator[Measurement]:
        """All runs."""
        for runs in self.runs.values():
            yield from runs.values()


def _usual(
    members: Mapping[Rung, Measurement], recurs: Mapping[Rung, Recurring]
) -> dict[Rung, Measurement]:
    """Without the steps after which something recurs."""
    return {rung: without(one, recurs.get(rung)) for rung, one in members.items()}


def _most(found: Iterable[Swing | None], least: float) -> Swing | None:
    """The widest of these, where it is wider than ``least``."""
    most = max(filter(None, found), key=lambda one: one.apart, default=None)
    return most if most is not None and most.apart > least else None


def reason_of(failed: Measurement) -> str:
    """Why a run has no result, by its status, and what to do about it."""
    return f"{failed.status}: {cause_of(failed)}{_hint(failed)}"


def _hint(measurement: Measurement) -> str:
    """What to do about a run that hung, or that was over its time."""
    if measurement.status == "hung":
        return f"; {OWN_WORK}"
    return LONGER if over_its_time(measurement) else ""


def cause_of(failed: Measurement) -> str:
    """Why a run has no result, in its own words."""
    return failed.cause.text if failed.cause else "it ended without a word"


def over_its_time(measurement: Measurement) -> bool:
    """Whether nfold ended it for that, and not a person."""
    stopped = measurement.cause is not None and measurement.cause.signal is not None
    return measurement.status == "interrupted" and not stopped


def _ahead(rung: Rung, table: Mapping[Key, Mapping[int, float]]) -> bool:
    """Whether its host was a step ahead of its devices, or more, in every run."""
    steps, ahead = table.get((rung, "step"), {}), table.get((rung, "ahead"), {})
    return all(ahead.get(number, 0.0) >= step_ms for number, step_ms in steps.items())


def _timed_s(measurement: Measurement) -> float:
    """Seconds that were timed of it."""
    return sum(window.seconds for rank in measurement.ranks[:1] for window in rank.windows)
