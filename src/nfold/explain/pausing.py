"""What to change about what a script does while it makes no step, with the line and its ranks."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from nfold.explain import wording
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.lines import at_loader, at_location, loader_setting, training_loader
from nfold.measurement import HostGapKind, HostGapLocation, Measurement
from nfold.seen import ScriptProfile

MIN_SAMPLED_S = 0.01
"""Of all looks at a rank together: fewer may have met anything."""
OTHER_RANK_FRACTION = 0.25
"""A rank is alone where no other one is so large a part of its time in its own code."""
NEARLY_ALL = 0.9
"""Of the time, which need not be told."""
ITERABLE_SAMPLER = "_InfiniteConstantSampler"
"""What PyTorch has in a sampler's place where an IterableDataset gives the batches."""
LocationsByRank = Sequence[Sequence[HostGapLocation]]


def with_gap_locations(
    design: ExperimentDesign, measurements: Iterable[Measurement]
) -> ExperimentDesign:
    """The ladder, with where each rank was in all these runs on N devices, too.

    What shared a process tree has seen the same. Independent copies are all of them rank 0.
    """
    if not design.gap_locations:
        return design
    same = (one for one in measurements if one.variant is None or not one.variant.independent)
    on_n = (one for one in same if len(one.ranks) == len(design.gap_locations))
    trees = {one.folder or one.id: one for one in on_n}
    ranks = zip(design.gap_locations, *(gap_locations(one) for one in trees.values()), strict=True)
    return dataclasses.replace(
        design, gap_locations=tuple(_sum_locations(chain(*rank)) for rank in ranks)
    )


def gap_locations(measurement: Measurement) -> tuple[tuple[HostGapLocation, ...], ...]:
    """Where each rank was in a run while it made no step."""
    return tuple(rank.host_gap_locations for rank in measurement.ranks)


def _sum_locations(locations: Iterable[HostGapLocation]) -> tuple[HostGapLocation, ...]:
    seconds: dict[HostGapLocation, float] = defaultdict(float)
    for spot in locations:
        seconds[dataclasses.replace(spot, seconds=0.0)] += spot.seconds
    return tuple(dataclasses.replace(spot, seconds=total) for spot, total in seconds.items())


@dataclass(frozen=True)
class GapLocation:
    """The line where most of such pauses is spent, a part of all; by ``rank`` alone, if it is."""

    location: HostGapLocation
    fraction: float
    rank: int | None

    def annotate(self, text: str) -> str:
        """The text, with what is called there and how large a part it is, if that need be told."""
        told = [self.location.callee] if self.location.callee else []
        told += [f"{self.fraction:.0%} of it"] if self.fraction < NEARLY_ALL else []
        return f"{text} ({', '.join(told)})" if told else text


def busiest_gap(
    ranks: LocationsByRank, when: HostGapKind, rank: int | None = None
) -> GapLocation | None:
    """Of the rank, or of the one that does most then; None where nobody has looked long enough."""
    each = [[spot for spot in spots if spot.kind == when] for spots in ranks]
    whole = [sum(spot.seconds for spot in spots) for spots in each]
    who = max(range(len(whole)), key=whole.__getitem__, default=0) if rank is None else rank
    if who >= len(whole) or whole[who] < MIN_SAMPLED_S:
        return None
    others = [seconds for other, seconds in enumerate(whole) if other != who]
    alone = bool(others) and max(others) < OTHER_RANK_FRACTION * whole[who]
    spot = max(each[who], key=lambda one: one.seconds)
    return GapLocation(spot, spot.seconds / whole[who], who if alone else None)


def shorten_epoch_boundary(
    profile: ScriptProfile, *, waits: bool, ranks: LocationsByRank = ()
) -> str:
    """Workers that stay, fewer first batches to wait for, less to do while no step is made.

    ``waits``: most of the time is waited for a first batch.
    """
    fed, text = training_loader(profile), _epoch_gap_advice(profile, ranks)
    if not fed.num_workers:
        return text
    if not fed.persistent_workers:
        stay = loader_setting(profile, "persistent_workers=True")
        return f"{stay}, and {text}" if waits else f"{text}; {stay}"
    if not waits:
        return text
    longer = (
        "one iterator for several epochs, counted in steps"
        if fed.sampler == ITERABLE_SAMPLER
        else "a sampler that goes through the data several times"
    )
    less = "less work a sample, which gains what input costs as well"
    return at_loader(profile, f"{longer} (every pass waits for its first batch), or {less}")


def _epoch_gap_advice(profile: ScriptProfile, ranks: LocationsByRank) -> str:
    """What to do less often, and where most of it is."""
    found = busiest_gap(ranks, "between passes")
    text = _change_text(profile, found, "do less there, or less often")
    if found is None:
        return text
    if found.rank is not None:
        text += f", or not on rank {found.rank} alone, which the others wait for"
    return at_location(found.location.location, found.annotate(text))


def _change_text(profile: ScriptProfile, found: GapLocation | None, change: str) -> str:
    """What a trainer has settings for, and what it may be where no line is known."""
    return (
        wording.trainer_advice(profile).evaluate_less_often
        if found is None or profile.trainer
        else change
    )


def reduce_periodic_work(design: ExperimentDesign, period: float, cost_ms: float) -> str:
    """What comes after every so many steps, and takes so many milliseconds each time."""
    assert design.profile is not None
    found, text = busiest_gap(design.gap_locations, "after some steps"), f"{cost_ms:.0f} ms"
    divide = "divide it"
    if found is not None and found.rank is not None:
        text += f" of rank {found.rank}, which the others wait for,"
        divide = "divide it over the ranks"
    text += f" come after one step in {period:.0f}"
    change = _change_text(design.profile, found, "do that less often")
    return _at_line(design.profile, found, text, f"{change}, or {divide}")


def reduce_host_gap(design: ExperimentDesign, gap_ms: float) -> str:
    """What the host does after every step until it asks for the next batch, or has it."""
    assert design.profile is not None
    until = (
        "the next batch is asked for" if design.can_replay_input else "its model is called again"
    )
    text = f"{gap_ms:.1f} ms pass after every step before {until}"
    found, change = (
        busiest_gap(design.gap_locations, "after a step"),
        "do less there, or less often",
    )
    if not design.can_replay_input:
        change += " (a batch made there: in a DataLoader's workers)"
    return _at_line(design.profile, found, text, change)


def reduce_rank_host_gap(design: ExperimentDesign, rank: int, extra_ms: float) -> str:
    """The same of a rank that does more than others."""
    assert design.profile is not None
    text = f"rank {rank} does something else for {extra_ms:.1f} ms between two steps"
    found = busiest_gap(design.gap_locations, "after a step", rank)
    return _at_line(design.profile, found, text, "do that less often")


def _at_line(profile: ScriptProfile, found: GapLocation | None, text: str, change: str) -> str:
    """Behind the line where that happens, or of the step that it follows."""
    if found is None:
        return at_location(profile.most_frequent_line("step"), f"{text}: {change}")
    return at_location(found.location.location, f"{found.annotate(text)}: {change}")
