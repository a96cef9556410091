"""Interleaving: several variants alternate within one process tree, or two process trees alternate.

Variants that alternate in one process can be compared without the differences between processes.
Process trees that alternate can be compared without what the machine does over seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from nfold.core.plan import Plan, prefetched_batches
from nfold.core.variant import Variant
from nfold.interventions.registry import REGISTRY

SWITCHABLE_FIELDS = tuple(name for name, each in REGISTRY.items() if each.switchable)
"""Fields of a Variant that a script can switch between two steps.

All other fields hold for a whole process. A framework may support fewer for built-in workloads.
"""
MAX_CYCLES = 4  # slots per variant, so that drift affects all variants alike
MIN_STEPS_FOR_MAX_CYCLES = 8  # with fewer steps, which are long, half as many cycles
SLICES = 6  # timed, of a run that alternates with another one
ALL_SLICES = 1 + SLICES  # with the warm-up, which is slice 0
SETTLE_STEPS = 3  # steps after a switch that belong to no window
RECAPTURE_STEPS = 4  # further steps before a captured step with new communication is recorded


@dataclass(frozen=True)
class Slot:
    """Consecutive steps of one variant, or slice; ``variant_index`` None: steps after a switch."""

    variant_index: int | None
    steps: int


def alternating_slots(plan: Plan) -> tuple[Slot, ...]:
    """Return the slots after the warm-up of a run that alternates with another one.

    The run waits before each of the slots whose steps are discarded, and its loader workers are
    stopped. These slots are as long as use up what was prefetched, but not longer than the warm-up.
    The last of them is its end.
    """
    prefetched = prefetched_batches(plan.workers or 0)
    steps, settle = _slot_steps(plan, SLICES), min(_refill_steps(plan), SETTLE_STEPS + prefetched)
    slots = ((Slot(None, settle), Slot(number, steps)) for number in range(SLICES))
    return (*itertools.chain.from_iterable(slots), Slot(None, 1))


def process_wide(variant: Variant, switched: Collection[str] = SWITCHABLE_FIELDS) -> Variant:
    """Return the part of a variant that cannot change within a process."""
    return variant.without(*switched)


def communication_key(variant: Variant) -> tuple[object, ...]:
    """Return a key that is equal for variants with the same communication in a step."""
    names = (name for name, each in REGISTRY.items() if each.changes_communication)
    return tuple(getattr(variant, name) for name in names)


def round_to_loader_cycle(steps: int, plan: Plan, most: int) -> int:
    """Round ``steps`` up to whole cycles of the loader's workers, if a cycle is at most ``most``.

    In a cycle every worker makes the same number of batches. If the loader is slow, its workers
    finish at the same time: with two workers every other step waits. Only windows of whole cycles
    are comparable.
    """
    workers = max(1, plan.workers or 0)
    cycle = workers // math.gcd(workers, plan.accumulate)
    return math.ceil(steps / cycle) * cycle if cycle <= most else steps


def schedule_slots(variants: Sequence[Variant], plan: Plan) -> tuple[Slot, ...]:
    """Return the slots after the warm-up; every variant gets at least ``plan.steps`` steps.

    After a switch between real and cached input, queues settle for as many steps as a warm-up has.
    Therefore variants with real input are adjacent, every other cycle runs in reverse order, and
    there are fewer cycles if settling is long.
    """
    steps, refill = plan.steps or 1, _refill_steps(plan)
    order = sorted(range(len(variants)), key=lambda index: variants[index].input)
    cycles = MAX_CYCLES if steps >= max(refill, MIN_STEPS_FOR_MAX_CYCLES) else MAX_CYCLES // 2
    slot_steps = _slot_steps(plan, cycles)
    sequence = [index for cycle in range(cycles) for index in order[:: -1 if cycle % 2 else 1]]
    slots: list[Slot] = []
    before = Variant()
    captured, recorded = "captured" in str(plan.step), {communication_key(before)}
    for index, run in groupby(sequence):
        now = variants[index]
        if now != before:
            refills = (before.input == "real") != (now.input == "real")
            recapture = captured and communication_key(now) not in recorded
            settle_steps = refill if refills else SETTLE_STEPS
            slots.append(Slot(None, settle_steps + (RECAPTURE_STEPS if recapture else 0)))
            recorded.add(communication_key(now))
        slots.append(Slot(index, slot_steps * len(list(run))))
        before = now
    return tuple(slots)


def _slot_steps(plan: Plan, count: int) -> int:
    """Return the steps of each of ``count`` slots."""
    steps = math.ceil((plan.steps or 1) / count)
    return round_to_loader_cycle(steps, plan, most=2 * steps)


def _refill_steps(plan: Plan) -> int:
    """Return the steps after which the queues of a loader are as full as usual."""
    return max(SETTLE_STEPS, plan.warmup_steps or 0)
