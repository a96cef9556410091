"""Experiments that take turns in one simulated run."""

from __future__ import annotations

import dataclasses
from itertools import chain, repeat

from nfold.frameworks.base import Task
from nfold.frameworks.simulated.script import Scenario
from nfold.frameworks.simulated.simulation import Simulation
from nfold.measurement import RankSamples


def simulate_interleaved(scenario: Scenario, task: Task) -> RankSamples:
    """What a rank measures of each, one after the other; they share the noise of their tree."""
    tree = f"{scenario.noise_seed}-{task.plan.id}-{task.variant}-{task.interleaved_variants}-{task.repeat}"
    found = []
    for left_out in task.interleaved_variants:
        alone = dataclasses.replace(task, requested_variant=left_out, interleaved_variants=())
        simulation = Simulation(scenario, alone, tree)
        found.append(simulation.samples(simulation.total_steps))
    numbers = (repeat(turn, len(one.windows)) for turn, one in enumerate(found))
    return dataclasses.replace(
        found[0],
        windows=tuple(chain.from_iterable(one.windows for one in found)),
        slots=tuple(chain.from_iterable(numbers)),
        step_ms=tuple(chain.from_iterable(one.step_ms for one in found)),
    )
