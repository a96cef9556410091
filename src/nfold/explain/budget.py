"""From the runs of a ladder to the N-fold budget. Pure functions."""

from __future__ import annotations

from nfold.budget import Budget
from nfold.explain import batch, head
from nfold.explain.account import Account
from nfold.explain.doubts import overtaken, short, warnings, wrong
from nfold.explain.fit import RESAMPLES
from nfold.explain.ladder import Ladder
from nfold.explain.measured import Measured
from nfold.explain.rows import Rows
from nfold.explain.untested import at_least, untested


def budget(
    target: str, ladder: Ladder, measured: Measured, *, resamples: int = RESAMPLES
) -> Budget:
    """Where the rest of N-fold went, as far as was measured; ``one`` and ``full`` were.

    Of one device, where the rest of what its compute alone would do went.
    """
    account = Account(ladder, measured, resamples)
    made = Rows(account)
    rows, single = made.on_n(), made.on_one()
    speedup = account.fit.interval(account.speedup)
    return Budget(
        target=target,
        plan=ladder.plan,
        scaling=ladder.scaling,
        one_device=account.speed(ladder.one),
        n_devices=account.speed(ladder.full(), ladder.devices if account.undivided else 1),
        ideal_ms=account.fit.interval(account.ideal_ms),
        speedup=speedup,
        rows=tuple(rows),
        single=tuple(single),
        interactions=tuple(made.interactions([*rows, *single])),
        device_bound=made.device_bound(),
        others_ms=account.others_ms(rows if ladder.devices > 1 else single),
        unexplained_ms=account.unexplained_ms(rows),
        wrong=wrong(account.kinds, account.whole, ladder.seen),
        warnings=(
            *overtaken(ladder, measured, account.achieved_ms(account.fit.view)),
            *short(ladder, account.fit.view.step(ladder.one)),
            *warnings(ladder, measured, account.fit),
        ),
        untested=tuple(untested(ladder, measured, account.fit.view)),
        at_least=at_least(ladder, measured, account.fit.view),
        limit=None
        if ladder.plain or ladder.devices == 1
        else batch.limit(ladder, measured, account.fit, speedup),
        way=head.way(ladder.seen) if ladder.seen else "",
        headline=_headline(target, ladder),
    )


def _headline(target: str, ladder: Ladder) -> str:
    """Of a script."""
    seen = ladder.seen
    return "" if seen is None else head.headline(target, seen, ladder.devices, ladder.failed)
