"""Time the start and end of a process tree, with a new agent and with a forked one.

    python benchmarks/agent_start.py [--ranks 2] [--pairs 5] [--between 3]

Every rank is a new program that imports torch, and where there are GPUs computes on its own. The
forked agent has imported torch before. Arms alternate, with a few seconds between two runs. Ratios
are formed pair by pair.
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
    AgentServer,
    ProcessSpec,
    RankGroup,
    RunOptions,
    agent_command,
)
from nfold.launch.supervisor import Supervisor

RANK = """
import os, torch
if torch.cuda.is_available():
    torch.ones(8, device=f"cuda:{os.environ['LOCAL_RANK']}").sum().item()
"""


def seconds(ranks: int, server: AgentServer, *, forks: bool) -> float:
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
            may_use_agent_server=forks,
        )
        began = time.monotonic()
        ending = Supervisor(
            folder, launch, RunOptions(results=folder.path, agent_server=server)
        ).run()
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
    with closing(AgentServer()) as server:
        # The first starts the server, and has a new agent.
        seconds(asked.ranks, server, forks=True)
        for _ in range(asked.pairs):
            for forks, took in found.items():
                time.sleep(asked.between)
                took.append(seconds(asked.ranks, server, forks=forks))
    new, forked = found[False], found[True]
    row = {
        "ranks": asked.ranks,
        "new_agent_s": serialize(bootstrap(new)),
        "forked_agent_s": serialize(bootstrap(forked)),
        "forked_over_new": serialize(paired_ratio(forked, new)),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
