"""Several experiments that take turns in one run, and when each has its turn. Pure.

A process is started once for all of them, and what two processes would differ by, two turns of
one process do not: they are compared inside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

from nfold.ablation import Ablation
from nfold.plan import Plan

SWITCHED = (
    "input",
    "exchange",
    "repeated_exchange",
    "synchronised_batch_norm",
    "buffers",
    "host_syncs",
    "anomaly_detection",
    "threads",
    "late_exchange",
)
"""What can change from step to step, in a script. The other fields of an Ablation hold for a whole
process, and a workload may have fewer of these: its framework says which."""
CYCLES, MANY_STEPS = 4, 8
"""How often each has its turn, at most: so drift meets all alike. Half as often with fewer steps,
which are long: those that settle take long, too."""
SETTLE = 3
"""Steps after a change that are in no window."""
RECORDED = 4
"""So many more the first time that something else is exchanged in a captured step: as many run as
they are before it is recorded again."""


@dataclass(frozen=True)
class Part:
    """Consecutive steps of one turn; ``turn`` None: steps in which a change takes effect."""

    turn: int | None
    steps: int


def held(ablation: Ablation, switched: Collection[str] = SWITCHED) -> Ablation:
    """What of it cannot change while a process lives."""
    usual = {f.name: f.default for f in fields(Ablation)}
    changes: dict[str, Any] = {name: usual[name] for name in switched}
    return dataclasses.replace(ablation, **changes)


def exchanged(ablation: Ablation) -> tuple[object, ...]:
    """What decides whether ranks exchange the same in a step as under another ablation."""
    return (ablation.exchange, ablation.synchronised_batch_norm)


def in_rounds(steps: int, plan: Plan, most: int) -> int:
    """So many steps, or a few more: whole rounds of a rank's loader, if one has at most ``most``.

    In a round every worker makes as many batches. Workers that are waited for have theirs ready at
    once: of two, every other step waits, so three or two of five do. Steps of whole rounds can be
    compared with each other.
    """
    workers = max(1, plan.workers or 0)
    whole = workers // math.gcd(workers, plan.accumulate)
    return math.ceil(steps / whole) * whole if whole <= most else steps


def schedule(turns: Sequence[Ablation], plan: Plan) -> tuple[Part, ...]:
    """What the steps after the warm-up are for; every turn has at least ``plan.steps`` in all.

    Where the real input goes or comes back, queues settle for as many steps as a warm-up has, in
    which what was made ahead is used up. So turns with the real input stand next to each other,
    every other cycle goes backwards, and long settling makes for fewer cycles.
    """
    steps, refill = plan.steps or 1, max(SETTLE, plan.warmup_steps or 0)
    order = sorted(range(len(turns)), key=lambda turn: turns[turn].input)
    cycles = CYCLES if steps >= max(refill, MANY_STEPS) else CYCLES // 2
    each = math.ceil(steps / cycles)
    each = in_rounds(each, plan, most=2 * each)
    sequence = [turn for cycle in range(cycles) for turn in order[:: -1 if cycle % 2 else 1]]
    found: list[Part] = []
    before = Ablation()
    captured, recorded = "captured" in str(plan.step), {exchanged(before)}
    for turn, run in groupby(sequence):
        now = turns[turn]
        if now != before:
            refills = (before.input == "real") != (now.input == "real")
            anew = RECORDED if captured and exchanged(now) not in recorded else 0
            found.append(Part(None, (refill if refills else SETTLE) + anew))
            recorded.add(exchanged(now))
        found.append(Part(turn, each * len(list(run))))
        before = now
    return tuple(found)
