"""All of tests/gpu on a machine with GPUs: a part on every pair of them, side by side.

    python tools/gpu_tests.py --out logs [--each 14] [--seconds 560]

Each part has GPUs and cores of its own and runs ``--each`` tests at a time. Tests marked ``alone``
(they compare times, or kill processes) follow one by one, when nothing else runs. The folder has a
log of each part, and a part that ran out of time says so; exit status 1 unless everything passed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nfold.telemetry.machine_inspection import inspect_machine

ROOT = Path(__file__).resolve().parents[1]
PAIR = 2
GRACE_S = 20.0
"""For a test run to print what it has when it is interrupted."""


@dataclass
class Part:
    """A run of some of the tests, and where it writes."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait(self, until: float) -> bool:
        """Whether all of its tests passed before that time; what is left running is ended."""
        try:
            status = f"exit status {self.process.wait(max(0.0, until - time.monotonic()))}"
        except subprocess.TimeoutExpired:
            status = "out of time"
            os.killpg(self.process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        last = self.log.read_text().splitlines()[-12:]
        sys.stdout.write("\n".join([f"{self.log.name}: {status}", *last, ""]))
        sys.stdout.flush()
        return status == "exit status 0"


def begin(
    name: str, gpus: list[int], cores: list[int], out: Path, told: list[str], shard: str = ""
) -> Part:
    """Start a part on these GPUs and cores."""
    log = out / f"{name}.txt"
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "tests/gpu", "-rfE", "--durations=10", *told,
             "-o", f"cache_dir={out / name}", f"--basetemp={out / name}-files"],
            cwd=ROOT,
            env={**os.environ, **visible, "NFOLD_SHARD": shard},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
    return Part(process, log)


def main() -> int:
    """Run them all; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-tests"), help="folder of the logs")
    parser.add_argument("--each", type=int, default=14, help="tests at a time on two GPUs")
    parser.add_argument("--seconds", type=float, default=1800.0, help="for all of them")
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    gpus = list(range(len(inspect_machine().gpus)))
    pairs = [gpus[at : at + PAIR] for at in range(0, len(gpus), PAIR)]
    if not pairs:
        parser.error("no GPU here; next: a machine with one")
    asked.out = asked.out.absolute()
    asked.out.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(pairs)
    told = ["-m", "gpu and not alone", "-n", str(asked.each), "--dist", "worksteal"]
    parts = [
        begin(
            f"part-{at}", pair, cores[share * at : share * (at + 1)], asked.out, told,
            f"{at}/{len(pairs)}",
        )
        for at, pair in enumerate(pairs)
    ]  # fmt: skip
    passed = [part.wait(until) for part in parts]
    passed.append(begin("alone", pairs[0], cores, asked.out, ["-m", "gpu and alone"]).wait(until))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
