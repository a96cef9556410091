"""One rank of a training on digits with resident data, on a host said to have some memory.

``resident.py FOLDER MEMORY_BYTES``; leaves what the rank measured as ``RANK.json``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from made import task
from nfold.core.serialization import serialize
from nfold.engines.base import Observer
from nfold.engines.torch.trainer import train
from nfold.launch.rank_lifecycle import exit_after_handlers

BATCH = 359
"""The last batch of 1,437 samples is a single one: all ranks but one pad."""

if __name__ == "__main__":
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    said: dict[str, Any] = {"input": "resident", "strategy": "nfold", "batch": BATCH, "epochs": 2}
    asked = task(rank=rank, world_size=ranks, cores_per_device=1, **said)
    host = dataclasses.replace(asked.machine, memory_bytes=int(sys.argv[2]))
    found = train(dataclasses.replace(asked, machine=host), Observer())
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(serialize(found)))
    exit_after_handlers()
