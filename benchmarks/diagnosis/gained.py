"""What a change gains by the clock of the scripts themselves, without nfold, both in turns.

    python benchmarks/diagnosis/gained.py --on 4 cifar_ddp.py cifar_ddp_fixed.py --turns 3

A host that is slow for a minute is so for both scripts of a turn: every turn gives a ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asking_nfold import hidden_gpus

from nfold.core.stats import bootstrap

HERE = Path(__file__).resolve().parent
ENDLESS = ["--epochs", "100000"]
LONGEST_S = 180.0
"""Until a script must have said something."""
ENDING_S = 20.0
"""For a script that is asked to end, before it is killed."""


Script = Sequence[str | Path]
"""A script's path and its arguments."""


@dataclass(frozen=True, kw_only=True)
class Clocked:
    """How scripts are timed: ``seconds`` of their steps on ``devices``, started by torchrun.

    ``alone``: of one process, by ``python``. On CPU devices nfold's launcher starts them: it gives
    every rank cores of its own, as nfold's experiments do.
    """

    devices: str
    seconds: float = 10.0
    alone: bool = False
    python: str = sys.executable

    def gain(self, number: int, faulty: Script, fixed: Script) -> float:
        """How many times as fast the repaired script is; the other is first in even turns."""
        ms: dict[bool, float] = {}
        for repaired in (False, True)[:: -1 if number % 2 else 1]:
            ms[repaired] = self.step_ms(fixed if repaired else faulty)
        told = f"{ms[False]:.2f} ms a step, repaired {ms[True]:.2f}"
        print(f"own clock, turn {number + 1}: {told}", file=sys.stderr, flush=True)
        return ms[False] / ms[True]

    def step_ms(self, script: Script) -> float:
        """Of a script by its own clock; RuntimeError where it says nothing for LONGEST_S."""
        path, *arguments = script
        with tempfile.TemporaryDirectory() as folder:
            file, log = Path(folder, "clocked.json"), Path(folder, "log")
            own = [HERE / "clocked.py", Path(path).resolve(), *ENDLESS, *arguments]
            with log.open("w") as output:
                started = subprocess.Popen(
                    [*self._launcher(), *map(str, own)],
                    cwd=folder,
                    env=self._environment(file),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    _wait(started, file)
                finally:
                    _end(started)
            if not file.exists():
                raise RuntimeError(f"{path} said nothing: {log.read_text()[-2000:]}")
            return 1e3 / float(json.loads(file.read_text())["steps_per_s"])

    def _launcher(self) -> list[str]:
        count = self.devices.rpartition(":")[2]
        if self.devices.startswith("cpu"):
            return [self.python, "-m", "nfold", "run", "--devices", count]
        if self.alone:
            return [self.python]
        return [self.python, "-m", "torch.distributed.run", "--nproc-per-node", count]

    def _environment(self, file: Path) -> dict[str, str]:
        own = {"CLOCKED_FILE": str(file), "CLOCKED_S": str(self.seconds)}
        return {**os.environ, **own, **hidden_gpus(self.devices)}


def _wait(started: subprocess.Popen[bytes], file: Path) -> None:
    end = time.monotonic() + LONGEST_S
    while not file.exists() and started.poll() is None and time.monotonic() < end:
        time.sleep(0.1)


def _end(started: subprocess.Popen[bytes]) -> None:
    """The launcher ends its ranks when it is told to; none is left for the next turn."""
    if started.poll() is None:
        started.send_signal(signal.SIGTERM)
    try:
        started.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        print(f"{started.args!r}: killed", file=sys.stderr, flush=True)
    try:
        os.killpg(started.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("faulty", type=Path)
    parser.add_argument("fixed", type=Path)
    parser.add_argument("--on", default="cpu:2", help="devices: cpu:2, 2, 4")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10, help="that are timed")
    parser.add_argument("--alone", action="store_true", help="scripts of one process")
    asked = parser.parse_args()
    clocked = Clocked(devices=asked.on, seconds=asked.seconds, alone=asked.alone)
    turns = range(asked.turns)
    gains = [clocked.gain(number, [asked.faulty], [asked.fixed]) for number in turns]
    gain = bootstrap(gains)
    print(json.dumps({"gain": gain.value, "low": gain.low, "high": gain.high, "turns": gains}))


if __name__ == "__main__":
    main()
