"""Experiments that take turns in one simulated run."""

from __future__ import annotations

import dataclasses
from itertools import chain, repeat

from nfold.frameworks.base import Task
from nfold.frameworks.simulated.script import Script
from nfold.frameworks.simulated.simulation import Simulation
from nfold.measurement import RankSamples


def in_turns(script: Script, task: Task) -> RankSamples:
    """What a rank measures of each, one after the other; they share the noise of their tree."""
    tree = f"{script.noise_seed}-{task.plan.id}-{task.left_out}-{task.turns}-{task.repeat}"
    found = []
    for left_out in task.turns:
        alone = dataclasses.replace(task, ablation=left_out, turns=())
        simulation = Simulation(script, alone, tree)
        found.append(simulation.samples(simulation.total))
    numbers = (repeat(turn, len(one.windows)) for turn, one in enumerate(found))
    return dataclasses.replace(
        found[0],
        windows=tuple(chain.from_iterable(one.windows for one in found)),
        turns=tuple(chain.from_iterable(numbers)),
        step_ms=tuple(chain.from_iterable(one.step_ms for one in found)),
    )
