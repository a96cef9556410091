"""The guardian: ends what an nfold process leaves behind, however that process ended.

``python -m nfold.launch.guardian`` reads from a pipe whose other end only its nfold process has: the
end of file also comes after SIGKILL. Then it kills the processes of the session and cleans up the
sandboxes of runs that were not settled. Each line of the pipe is a JSON list of an event and a
folder. Imports only the standard library and nfold.core before the end of file, to start fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from nfold.core.process_identity import SESSION_VARIABLE, ProcessIdentity, session_processes

STARTED, SETTLED = "started", "settled"
KILL_TIMEOUT_S = 5.0
KILL_POLL_S = 0.02
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Guardian:
    """Starts and informs the guardian of this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._close)

    def start(self) -> str:
        """Start the guardian if none is running; returns the marker of this session.

        All processes that this process starts from now on inherit the marker.
        """
        session = os.environ[SESSION_VARIABLE] = ProcessIdentity.of_this_process().session_marker
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nfold.launch.guardian"],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return session

    def run_marker(self, folder: Path) -> str:
        """Return the marker of the processes of one run of this session."""
        return f"{self.start()} {folder.name}"

    @contextlib.contextmanager
    def watch(self, sandbox: Path) -> Iterator[None]:
        """Have the sandbox cleaned up if this process ends before the context has ended."""
        self.start()
        self._tell(STARTED, sandbox)
        yield
        self._tell(SETTLED, sandbox)

    def _tell(self, event: str, folder: Path) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # killed: the next start of nfold cleans up
            self._process.stdin.write(json.dumps([event, str(folder.absolute())]).encode() + b"\n")

    def _close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None


GUARDIAN = Guardian()


def main() -> None:
    for signum in IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    folders = read_unsettled(sys.stdin.buffer)
    kill_session(os.environ[SESSION_VARIABLE])
    for folder in folders:
        from nfold.sandbox import clean_up

        with contextlib.suppress(Exception):  # the next start of nfold tries again and reports
            clean_up(Path(folder))


def read_unsettled(events: Iterable[bytes]) -> list[str]:
    """Return the sandboxes that were not settled when the events ended."""
    folders: dict[str, None] = {}
    for line in events:
        if not line.endswith(b"\n"):  # nfold was killed while it wrote it
            break
        event, folder = json.loads(line)
        if event == STARTED:
            folders[folder] = None
        else:
            folders.pop(folder, None)
    return list(folders)


def kill_session(marker: str) -> None:
    """SIGKILL the processes of a session until there are none, for 5 s at most."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (pids := session_processes(marker)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(KILL_POLL_S)


if __name__ == "__main__":
    main()
