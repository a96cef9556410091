"""What ``nfold explain --json`` says, from a fresh results folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

LAST = 2000
"""Characters of what a run that failed has written: its error is at the end."""


def hidden_gpus(devices: str) -> dict[str, str]:
    """On CPU devices a script must see no GPU: what its environment then has more."""
    return {"CUDA_VISIBLE_DEVICES": ""} if devices.startswith("cpu") else {}


def explained(
    command: Sequence[str],
    budget: str,
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    verbose: bool = False,
) -> Any:
    """The object that is printed; ``command`` is the target and what follows it.

    ``environment`` comes on top of this process's own. Raises RuntimeError with the end of what it
    wrote where it fails.
    """
    target, *rest = command
    with tempfile.TemporaryDirectory() as results:
        told = ["--json", "--no-report", "--budget", budget, "--results", results]
        done = subprocess.run(
            [python, "-m", "nfold", "explain", target, *told, *rest],
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=None if verbose else subprocess.PIPE,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {(done.stderr or '')[-LAST:]}")
    return json.loads(done.stdout)
