"""The fitted values of all rungs, as causes ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nfold.explain.polish import MetricKey
from nfold.explain.rung import Trial, over_short_epochs, over_whole_epochs


@dataclass(frozen=True)
class MetricView:
    """One value for every reading of every rung: the fitted ones, or one resample of them.

    ``reference`` are the ranks that stand for one device where ranks do not wait. ``final`` where
    nothing more will be measured. ``failed`` are rungs that could not be run.
    """

    values: Mapping[MetricKey, float]
    reference: tuple[int, ...] = ()
    final: bool = True
    failed_trials: frozenset[Trial] = frozenset()
    epoch_metric_keys: dict[MetricKey, MetricKey | None] = field(
        default_factory=dict, compare=False, repr=False
    )
    cache: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def step(self, trial: Trial) -> float:
        """Milliseconds of a step."""
        return self.values[trial, "step"]

    def reference_step(self, trial: Trial) -> float:
        """Of the reference ranks by themselves."""
        found = [self.values.get((trial, f"rank {k}")) for k in self.reference]
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known else self.step(trial)

    def step_by_rank(self, trial: Trial) -> dict[int, float]:
        """A step of every rank by itself, where ranks do not wait."""
        return {
            int(name.removeprefix("rank ")): value
            for (one, name), value in self.values.items()
            if one == trial and name.startswith("rank ")
        }

    def slowest_rank_step(self, trial: Trial) -> float:
        """What a step would take if ranks waited for each other."""
        return self.values[trial, "slowest"]

    def epoch_gap(self, trial: Trial) -> float:
        """Milliseconds a step between epochs."""
        place = self._epoch_metric_key(trial, "gap")
        assert place is not None
        return self.values[place]

    def first_batch_wait(self, trial: Trial) -> float:
        """Of the time between epochs, what is waited for an epoch's first batch."""
        place = self._epoch_metric_key(trial, "first")
        return 0.0 if place is None else self.values[place]

    def host_ahead(self, trial: Trial) -> float | None:
        """Milliseconds by which the host is ahead of its devices; None where nobody can tell."""
        return self.values.get((trial, "ahead"))

    def host_gap(self, trial: Trial) -> float | None:
        """Milliseconds between two steps in which a host usually does something else, of the rank
        where that is least; None where nobody can tell.
        """
        return self.values.get((trial, "pause"))

    def periodic_ms(self, trial: Trial) -> float:
        """Milliseconds a step of what is done after some steps only."""
        return self.values[trial, "recurring"]

    def period(self, trial: Trial) -> float | None:
        """The steps from one time to the next of what costs most of it."""
        return self.values.get((trial, "every"))

    def has_periodic(self, trial: Trial) -> bool:
        """Whether it is known, because there was enough of it, or none in long enough a time."""
        return (trial, "recurring") in self.values

    def has_epoch_gap(self, trial: Trial) -> bool:
        """Whether an epoch ended while the rung was measured, in steps or in whole epochs."""
        return self._epoch_metric_key(trial, "gap") is not None

    def loading_and_waiting(self, trial: Trial) -> tuple[float, float]:
        """Milliseconds a step in which batches are made, and those of them spent waiting."""
        return self.values.get((trial, "loading"), 0.0), self.values.get((trial, "waiting"), 0.0)

    def has(self, *rungs: Trial) -> bool:
        """Whether all of these were measured."""
        return all((rung, "step") in self.values for rung in rungs)

    def all_or_none(self, trials: tuple[Trial, ...]) -> tuple[Trial, ...]:
        """These, or none where one was not measured."""
        return trials if self.has(*trials) else ()

    def _epoch_metric_key(self, trial: Trial, metric: str) -> MetricKey | None:
        """Where a reading of what lies between epochs stands; None: nowhere."""
        asked = (trial, metric)
        if asked not in self.epoch_metric_keys:
            every = (
                (one, metric) for one in (trial, over_whole_epochs(trial), over_short_epochs(trial))
            )
            self.epoch_metric_keys[asked] = next((key for key in every if key in self.values), None)
        return self.epoch_metric_keys[asked]
