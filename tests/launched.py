"""Starts a script once for every rank of a process group, without nfold's own launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


def launch(script: Path, world: int, *arguments: str) -> None:
    """Run ``world`` ranks of the script to their end; fails with their errors where one does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    path = f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(errors)


class RunsByWorld(dict[Any, Any]):
    """Results by world or by (case, world); the cases of a world run when one is first asked for."""

    def __init__(self, run: Callable[[int], dict[Any, Any]]) -> None:
        super().__init__()
        self._run = run

    def __missing__(self, key: Any) -> Any:
        self.update(self._run(key[1] if isinstance(key, tuple) else key))
        return self[key]
