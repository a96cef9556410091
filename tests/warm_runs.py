"""Runs of tests start faster: their ranks are forks of one process that has imported PyTorch."""

from __future__ import annotations

import atexit
import functools
from pathlib import Path
from typing import Any

from nfold.core.script_profile import LoadedLibraries
from nfold.launch.launch_spec import AgentServer, RunOptions

# What a rank imports that the launcher of ranks does not.
LIBRARIES = LoadedLibraries(modules=("torch.nn.parallel", "torch._dynamo"))


@functools.cache
def _server() -> AgentServer:
    server = AgentServer()
    atexit.register(server.close)
    return server


def warm_options(results: Path, **options: Any) -> RunOptions:
    """Return the options of a run whose ranks need not be new programs."""
    warm = {"agent_server": _server(), "libraries": LIBRARIES}
    return RunOptions(results=results, **{**warm, **options})
