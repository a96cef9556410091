"""Which rungs are asked for: by the causes that a plan can have, and by what was found so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nfold.explain import batch
from nfold.explain.account import Account
from nfold.explain.causes import BY_ID, Cause, causes_of
from nfold.explain.causes.input import real_ladder
from nfold.explain.ladder import Ladder
from nfold.explain.measured import Measured
from nfold.explain.pairs import pairs
from nfold.explain.rows import Rows
from nfold.explain.rung import Rung
from nfold.explain.view import View
from nfold.finding import Finding

NARROW = 0.01
"""Of a step: once every interval is as narrow, nothing is repeated."""
PROBING = 100
"""Resamples while the experiment goes on: its choices need no more."""
WORSE = 0.2
"""Of a step: a fix with which one takes so much longer than with another is not measured again."""
SUSPECT = 0.1
"""Of a step: what seems to cost as much is worth its fixes, however wide its interval."""


def wanted(ladder: Ladder) -> Iterator[Rung]:
    """The rungs of every cause that the plan can have, of those first that have been seen.

    Ends of epochs are asked for apart.
    """
    yield from evident(ladder)
    for cause in causes_of(ladder):
        yield from _own(ladder, cause)


def evident(ladder: Ladder) -> Iterator[Rung]:
    """The rungs of causes that have been seen to happen."""
    for cause in causes_of(ladder):
        if cause.evident(ladder):
            yield from _own(ladder, cause)


def _own(ladder: Ladder, cause: Cause) -> Iterator[Rung]:
    if cause.absent(ladder) is None:
        own = (*cause.on_n(ladder), *cause.telling(ladder))
        for rung in (*own, *cause.single_evidence(ladder)):
            if rung.plan.steps is not None and rung.ablation.pass_batches is None:
                yield rung


def urgent(ladder: Ladder, measured: Measured) -> list[Rung]:
    """Of one device: the fixes of what takes more than half of a step.

    What is left to ask about can take less. N devices have the rest of their ladder first.
    """
    if ladder.devices > 1:
        return []
    account = Account(ladder, measured, PROBING, final=False)
    half_ms = account.achieved_ms(account.fit.view) / 2
    rows = [row for row in Rows(account).on_one() if row.named and row.all_ms.value > half_ms]
    return [rung for row in rows for flag, rung in BY_ID[row.cause].fixes(ladder).items() if flag]


def follow_ups(ladder: Ladder, measured: Measured) -> list[Rung]:
    """What the rows so far ask for: fixes first, causes taken away together, other batches.

    Fixes of what costs most come first: time may be over soon.
    """
    account = Account(ladder, measured, PROBING, final=False)
    made = Rows(account)
    rows = [*made.on_n(), *made.on_one()]
    named = [row for row in rows if row.named]
    step_ms = account.achieved_ms(account.fit.view)
    asking = [*named, *_suspected(ladder, rows, named, step_ms)]
    found: list[Rung] = []
    asking.sort(key=lambda row: -row.all_ms.value)
    for cause in dict.fromkeys(row.cause for row in asking):
        found += _promising(BY_ID[cause].fixes(ladder), account.fit.view, WORSE * step_ms)
    found += [rung for pair in pairs(ladder, named) for rung in pair.rungs]
    if ladder.devices > 1 and any(row.cause in ("input", "storage") for row in asking):
        found += real_ladder(ladder)
    if account.speedup(account.fit.view) < 1 and not ladder.plain and ladder.rebatches:
        found += batch.rungs(ladder)
    return list(dict.fromkeys(found))


def _promising(fixes: Mapping[str, Rung], view: View, worse_ms: float) -> list[Rung]:
    """Those that are unknown, or about as good as the best; runs that only tell more stay."""
    known = [view.step(rung) for flag, rung in fixes.items() if flag and view.has(rung)]
    most = min(known, default=0.0) + worse_ms
    return [
        rung
        for flag, rung in fixes.items()
        if not (flag and view.has(rung)) or view.step(rung) < most
    ]


def _suspected(
    ladder: Ladder, rows: list[Finding], named: list[Finding], step_ms: float
) -> list[Finding]:
    """Where nothing is named: the row that seems to cost most of those that cost much.

    Where nothing that is named has fixes to measure, the one of them that has: a fix says more
    than the same rung again, either it helps or it does not.
    """
    much = [row for row in rows if row.lost_ms.value > SUSPECT * step_ms]
    much.sort(key=lambda row: -row.lost_ms.value)
    found = [] if named else much[:1]
    if not any(BY_ID[row.cause].fixes(ladder) for row in named):
        found += [row for row in much if BY_ID[row.cause].fixes(ladder)][:1]
    return found


def narrowing(ladder: Ladder, measured: Measured) -> list[Rung]:
    """What makes the widest row narrower; empty where all are narrow."""
    account = Account(ladder, measured, PROBING, final=False)
    made = Rows(account)
    rows = made.on_n() if ladder.devices > 1 else made.on_one()
    widest = max(rows, key=_width, default=None)
    if widest is None or _width(widest) < NARROW * account.achieved_ms(account.fit.view):
        return []
    cause = BY_ID[widest.cause]
    told = (rung for rung in cause.telling(ladder) if measured.rounds(rung))
    own = cause.on_n(ladder) or cause.single_evidence(ladder)
    return [ladder.full(), ladder.one, *own, *told]


def _width(row: Finding) -> float:
    assert row.lost_ms.low is not None
    assert row.lost_ms.high is not None
    return row.lost_ms.high - row.lost_ms.low
