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

from nfold.core.plan import Plan
from nfold.core.variant import Variant

SWITCHABLE_FIELDS = (
    "input",
    "exchange",
    "exchange_each_micro_batch",
    "synchronised_batch_norm",
    "broadcast_buffers",
    "host_syncs",
    "anomaly_detection",
    "threads",
    "exchange_after_backward",
)
"""What can change from step to step, in a script. The other fields of an Ablation hold for a whole
process, and a workload may have fewer of these: its framework says which."""
MAX_CYCLES, MIN_STEPS_FOR_MAX_CYCLES = 4, 8
"""How often each has its turn, at most: so drift meets all alike. Half as often with fewer steps,
which are long: those that settle take long, too."""
SETTLE_STEPS = 3
"""Steps after a change that are in no window."""
RECAPTURE_STEPS = 4
"""So many more the first time that something else is exchanged in a captured step: as many run as
they are before it is recorded again."""


@dataclass(frozen=True)
class Slot:
    """Consecutive steps of one turn; ``turn`` None: steps in which a change takes effect."""

    variant_index: int | None
    steps: int


def process_wide(variant: Variant, switched: Collection[str] = SWITCHABLE_FIELDS) -> Variant:
    """What of it cannot change while a process lives."""
    usual = {f.name: f.default for f in fields(Variant)}
    changes: dict[str, Any] = {name: usual[name] for name in switched}
    return dataclasses.replace(variant, **changes)


def communication_key(variant: Variant) -> tuple[object, ...]:
    """What decides whether ranks exchange the same in a step as under another ablation."""
    return (variant.exchange, variant.synchronised_batch_norm)


def round_to_loader_cycle(steps: int, plan: Plan, most: int) -> int:
    """So many steps, or a few more: whole rounds of a rank's loader, if one has at most ``most``.

    In a round every worker makes as many batches. Workers that are waited for have theirs ready at
    once: of two, every other step waits, so three or two of five do. Steps of whole rounds can be
    compared with each other.
    """
    workers = max(1, plan.workers or 0)
    whole = workers // math.gcd(workers, plan.accumulate)
    return math.ceil(steps / whole) * whole if whole <= most else steps


def schedule_slots(variants: Sequence[Variant], plan: Plan) -> tuple[Slot, ...]:
    """What the steps after the warm-up are for; every turn has at least ``plan.steps`` in all.

    Where the real input goes or comes back, queues settle for as many steps as a warm-up has, in
    which what was made ahead is used up. So turns with the real input stand next to each other,
    every other cycle goes backwards, and long settling makes for fewer cycles.
    """
    steps, refill = plan.steps or 1, max(SETTLE_STEPS, plan.warmup_steps or 0)
    order = sorted(range(len(variants)), key=lambda turn: variants[turn].input)
    cycles = MAX_CYCLES if steps >= max(refill, MIN_STEPS_FOR_MAX_CYCLES) else MAX_CYCLES // 2
    each = math.ceil(steps / cycles)
    each = round_to_loader_cycle(each, plan, most=2 * each)
    sequence = [turn for cycle in range(cycles) for turn in order[:: -1 if cycle % 2 else 1]]
    found: list[Slot] = []
    before = Variant()
    captured, recorded = "captured" in str(plan.step), {communication_key(before)}
    for turn, run in groupby(sequence):
        now = variants[turn]
        if now != before:
            refills = (before.input == "real") != (now.input == "real")
            anew = RECAPTURE_STEPS if captured and communication_key(now) not in recorded else 0
            found.append(Slot(None, (refill if refills else SETTLE_STEPS) + anew))
            recorded.add(communication_key(now))
        found.append(Slot(turn, each * len(list(run))))
        before = now
    return tuple(found)
