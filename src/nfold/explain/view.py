"""The fitted values of all rungs, as causes ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nfold.explain.polish import Key
from nfold.explain.rung import Rung, short_passes, whole_epochs


@dataclass(frozen=True)
class View:
    """One value for every reading of every rung: the fitted ones, or one resample of them.

    ``reference`` are the ranks that stand for one device where ranks do not wait. ``final`` where
    nothing more will be measured. ``failed`` are rungs that could not be run.
    """

    values: Mapping[Key, float]
    reference: tuple[int, ...] = ()
    final: bool = True
    failed: frozenset[Rung] = frozenset()
    places: dict[Key, Key | None] = field(default_factory=dict, compare=False, repr=False)
    made: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def step(self, rung: Rung) -> float:
        """Milliseconds of a step."""
        return self.values[rung, "step"]

    def own(self, rung: Rung) -> float:
        """Of the reference ranks by themselves."""
        found = [self.values.get((rung, f"rank {k}")) for k in self.reference]
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known else self.step(rung)

    def ranks(self, rung: Rung) -> dict[int, float]:
        """A step of every rank by itself, where ranks do not wait."""
        return {
            int(name.removeprefix("rank ")): value
            for (one, name), value in self.values.items()
            if one == rung and name.startswith("rank ")
        }

    def slowest(self, rung: Rung) -> float:
        """What a step would take if ranks waited for each other."""
        return self.values[rung, "slowest"]

    def gap(self, rung: Rung) -> float:
        """Milliseconds a step between epochs."""
        place = self._between(rung, "gap")
        assert place is not None
        return self.values[place]

    def first_wait(self, rung: Rung) -> float:
        """Of the time between epochs, what is waited for an epoch's first batch."""
        place = self._between(rung, "first")
        return 0.0 if place is None else self.values[place]

    def ahead(self, rung: Rung) -> float | None:
        """Milliseconds by which the host is ahead of its devices; None where nobody can tell."""
        return self.values.get((rung, "ahead"))

    def pause(self, rung: Rung) -> float | None:
        """Milliseconds between two steps in which a host usually does something else, of the rank
        where that is least; None where nobody can tell.
        """
        return self.values.get((rung, "pause"))

    def recurring(self, rung: Rung) -> float:
        """Milliseconds a step of what is done after some steps only."""
        return self.values[rung, "recurring"]

    def every(self, rung: Rung) -> float | None:
        """The steps from one time to the next of what costs most of it."""
        return self.values.get((rung, "every"))

    def has_recurring(self, rung: Rung) -> bool:
        """Whether it is known, because there was enough of it, or none in long enough a time."""
        return (rung, "recurring") in self.values

    def has_gap(self, rung: Rung) -> bool:
        """Whether an epoch ended while the rung was measured, in steps or in whole epochs."""
        return self._between(rung, "gap") is not None

    def fetching(self, rung: Rung) -> tuple[float, float]:
        """Milliseconds a step in which batches are made, and those of them spent waiting."""
        return self.values.get((rung, "loading"), 0.0), self.values.get((rung, "waiting"), 0.0)

    def has(self, *rungs: Rung) -> bool:
        """Whether all of these were measured."""
        return all((rung, "step") in self.values for rung in rungs)

    def all_or_none(self, rungs: tuple[Rung, ...]) -> tuple[Rung, ...]:
        """These, or none where one was not measured."""
        return rungs if self.has(*rungs) else ()

    def _between(self, rung: Rung, reading: str) -> Key | None:
        """Where a reading of what lies between epochs stands; None: nowhere."""
        asked = (rung, reading)
        if asked not in self.places:
            every = ((one, reading) for one in (rung, whole_epochs(rung), short_passes(rung)))
            self.places[asked] = next((key for key in every if key in self.values), None)
        return self.places[asked]
