"""What to change about what a script does while it makes no step, with the line and its ranks."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from nfold.explain import wording
from nfold.explain.ladder import Ladder
from nfold.explain.lines import at, fed_at, loader, setting
from nfold.measurement import Measurement, PausedAt, When
from nfold.seen import Seen

LEAST_S = 0.01
"""Of all looks at a rank together: fewer may have met anything."""
ALONE = 0.25
"""A rank is alone where no other one is so large a part of its time in its own code."""
ALL = 0.9
"""Of the time, which need not be told."""
STREAM = "_InfiniteConstantSampler"
"""What PyTorch has in a sampler's place where an IterableDataset gives the batches."""
Ranks = Sequence[Sequence[PausedAt]]


def known(ladder: Ladder, found: Iterable[Measurement]) -> Ladder:
    """The ladder, with where each rank was in all these runs on N devices, too.

    What shared a process tree has seen the same. Independent copies are all of them rank 0.
    """
    if not ladder.paused_at:
        return ladder
    same = (one for one in found if one.ablation is None or not one.ablation.independent)
    on_n = (one for one in same if len(one.ranks) == len(ladder.paused_at))
    trees = {one.folder or one.id: one for one in on_n}
    ranks = zip(ladder.paused_at, *(where(one) for one in trees.values()), strict=True)
    return dataclasses.replace(ladder, paused_at=tuple(_together(chain(*rank)) for rank in ranks))


def where(measurement: Measurement) -> tuple[tuple[PausedAt, ...], ...]:
    """Where each rank was in a run while it made no step."""
    return tuple(rank.paused_at for rank in measurement.ranks)


def _together(spots: Iterable[PausedAt]) -> tuple[PausedAt, ...]:
    seconds: dict[PausedAt, float] = defaultdict(float)
    for spot in spots:
        seconds[dataclasses.replace(spot, seconds=0.0)] += spot.seconds
    return tuple(dataclasses.replace(spot, seconds=total) for spot, total in seconds.items())


@dataclass(frozen=True)
class There:
    """The line where most of such pauses is spent, a part of all; by ``rank`` alone, if it is."""

    spot: PausedAt
    part: float
    rank: int | None

    def beside(self, text: str) -> str:
        """The text, with what is called there and how large a part it is, if that need be told."""
        told = [self.spot.calls] if self.spot.calls else []
        told += [f"{self.part:.0%} of it"] if self.part < ALL else []
        return f"{text} ({', '.join(told)})" if told else text


def there(ranks: Ranks, when: When, rank: int | None = None) -> There | None:
    """Of the rank, or of the one that does most then; None where nobody has looked long enough."""
    each = [[spot for spot in spots if spot.when == when] for spots in ranks]
    whole = [sum(spot.seconds for spot in spots) for spots in each]
    who = max(range(len(whole)), key=whole.__getitem__, default=0) if rank is None else rank
    if who >= len(whole) or whole[who] < LEAST_S:
        return None
    others = [seconds for other, seconds in enumerate(whole) if other != who]
    alone = bool(others) and max(others) < ALONE * whole[who]
    spot = max(each[who], key=lambda one: one.seconds)
    return There(spot, spot.seconds / whole[who], who if alone else None)


def between_epochs(seen: Seen, *, waits: bool, ranks: Ranks = ()) -> str:
    """Workers that stay, fewer first batches to wait for, less to do while no step is made.

    ``waits``: most of the time is waited for a first batch.
    """
    fed, text = loader(seen), _rarely(seen, ranks)
    if not fed.workers:
        return text
    if not fed.persistent_workers:
        stay = setting(seen, "persistent_workers=True")
        return f"{stay}, and {text}" if waits else f"{text}; {stay}"
    if not waits:
        return text
    longer = (
        "one iterator for several epochs, counted in steps"
        if fed.sampler == STREAM
        else "a sampler that goes through the data several times"
    )
    less = "less work a sample, which gains what input costs as well"
    return fed_at(seen, f"{longer} (every pass waits for its first batch), or {less}")


def _rarely(seen: Seen, ranks: Ranks) -> str:
    """What to do less often, and where most of it is."""
    found = there(ranks, "between passes")
    text = _less(seen, found, "do less there, or less often")
    if found is None:
        return text
    if found.rank is not None:
        text += f", or not on rank {found.rank} alone, which the others wait for"
    return at(found.spot.where, found.beside(text))


def _less(seen: Seen, found: There | None, change: str) -> str:
    """What a trainer has settings for, and what it may be where no line is known."""
    return wording.of(seen).rarely if found is None or seen.trainer else change


def after_some_steps(ladder: Ladder, every: float, cost_ms: float) -> str:
    """What comes after every so many steps, and takes so many milliseconds each time."""
    assert ladder.seen is not None
    found, text = there(ladder.paused_at, "after some steps"), f"{cost_ms:.0f} ms"
    divide = "divide it"
    if found is not None and found.rank is not None:
        text += f" of rank {found.rank}, which the others wait for,"
        divide = "divide it over the ranks"
    text += f" come after one step in {every:.0f}"
    change = _less(ladder.seen, found, "do that less often")
    return _at_line(ladder.seen, found, text, f"{change}, or {divide}")


def after_every_step(ladder: Ladder, usual_ms: float) -> str:
    """What the host does after every step until it asks for the next batch, or has it."""
    assert ladder.seen is not None
    until = "the next batch is asked for" if ladder.feeds else "its model is called again"
    text = f"{usual_ms:.1f} ms pass after every step before {until}"
    found, change = there(ladder.paused_at, "after a step"), "do less there, or less often"
    if not ladder.feeds:
        change += " (a batch made there: in a DataLoader's workers)"
    return _at_line(ladder.seen, found, text, change)


def of_rank(ladder: Ladder, rank: int, more_ms: float) -> str:
    """The same of a rank that does more than others."""
    assert ladder.seen is not None
    text = f"rank {rank} does something else for {more_ms:.1f} ms between two steps"
    found = there(ladder.paused_at, "after a step", rank)
    return _at_line(ladder.seen, found, text, "do that less often")


def _at_line(seen: Seen, found: There | None, text: str, change: str) -> str:
    """Behind the line where that happens, or of the step that it follows."""
    if found is None:
        return at(seen.first_place("step"), f"{text}: {change}")
    return at(found.spot.where, f"{found.beside(text)}: {change}")
