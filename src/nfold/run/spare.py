"""An agent that starts before it is needed: importing torch takes it seconds (docs/decisions/process-launch.md)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping

from nfold.lifeline import child_environment
from nfold.run.handoff import HandoffFolder
from nfold.run.processes import AGENT_MODULE, module_command


class WarmAgent:
    """At most one agent that waits for a run of this process.

    The first starts with the first run that could have had one, and another whenever one is
    taken: beside the start of that run's ranks, before anything is timed.
    """

    def __init__(self) -> None:
        self._waiting: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the one that waits."""
        if self._waiting is not None:
            self._waiting.kill()
            self._waiting.communicate()
            self._waiting = None

    def take(
        self, folder: HandoffFolder, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | None:
        """The agent that waited, from now on that of ``folder``; None where there is none.

        ``environment`` is all that it is to have, and its ranks from it.
        """
        taken, self._waiting = self._waiting, _start_agent()
        if taken is None:
            return None
        assert taken.stdin is not None
        told = {"folder": str(folder.path.absolute()), "environment": dict(environment)}
        try:
            taken.stdin.write(json.dumps(told).encode() + b"\n")
            taken.stdin.close()
        except BrokenPipeError:  # somebody ended it
            taken.wait()
            return None
        return taken


def _start_agent() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        module_command(AGENT_MODULE),
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
