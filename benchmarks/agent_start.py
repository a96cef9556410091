"""How long a tree of ranks takes to start and end: with an agent of its own, or one that waited.

    python benchmarks/agent_start.py [--ranks 2] [--pairs 5] [--between 3]

Every rank imports torch, and where there are GPUs computes on its own, as a measurement's do. Arms
alternate; between two runs nothing happens for a few seconds, in which the next agent starts as it
does while a run is timed. Ratios are formed pair by pair.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from nfold.core.serialization import serialize
from nfold.core.stats import bootstrap, paired_ratio
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import (
    LOOPBACK_ENVIRONMENT,
    ProcessSpec,
    RankGroup,
    RunOptions,
    WarmAgent,
    agent_command,
)
from nfold.launch.supervisor import Supervisor

RANK = """
import os, torch
if torch.cuda.is_available():
    torch.ones(8, device=f"cuda:{os.environ['LOCAL_RANK']}").sum().item()
"""


def seconds(ranks: int, spare: WarmAgent, *, waits: bool) -> float:
    """Of one tree, from its start until nothing of it is left."""
    with tempfile.TemporaryDirectory() as place:
        folder = HandoffFolder(Path(place))
        root = agent_command(
            folder, RankGroup(processes=ranks, command=(sys.executable, "-c", RANK))
        )
        launch = ProcessSpec(
            command=root,
            environment=LOOPBACK_ENVIRONMENT,
            processes=ranks,
            may_use_warm_agent=waits,
        )
        began = time.monotonic()
        ending = Supervisor(folder, launch, RunOptions(results=folder.path, warm_agent=spare)).run()
        took = time.monotonic() - began
        if ending.exit_code != 0:
            raise RuntimeError(folder.agent_log.read_text()[-2000:])
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--between", type=float, default=3.0, help="seconds between two runs")
    asked = parser.parse_args()
    found: dict[bool, list[float]] = {False: [], True: []}
    with closing(WarmAgent()) as spare:
        # The first has none to take, and starts the one that waits.
        seconds(asked.ranks, spare, waits=True)
        for _ in range(asked.pairs):
            for waits, took in found.items():
                time.sleep(asked.between)
                took.append(seconds(asked.ranks, spare, waits=waits))
    own, waited = found[False], found[True]
    row = {
        "ranks": asked.ranks,
        "own_agent_s": serialize(bootstrap(own)),
        "waiting_agent_s": serialize(bootstrap(waited)),
        "waiting_over_own": serialize(paired_ratio(waited, own)),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
