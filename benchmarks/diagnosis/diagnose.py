"""Injects causes of known size, has ``nfold explain`` find them, and prints the score.

    python benchmarks/diagnosis/diagnose.py --on simulated --healthy 20
    python benchmarks/diagnosis/diagnose.py --on cpu:2 --cause imbalance --doses 2,5,10,20

On the simulated framework costs are exact; on CPU devices ``planted.py`` puts them into digits.
Doses are milliseconds a step on two devices.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diagnosis_score import Case, table

from nfold.finding import beyond
from nfold.stats import Interval

HERE = Path(__file__).resolve().parent
DOSES = (0.5, 1.0, 2.0, 4.0)
BASE: dict[str, Any] = {"compute_ms_per_sample": 0.1, "noise": 0.01, "process_noise": 0.005}
SHARE = 100
"""Samples of a device in a step, on the simulated framework: 10 ms."""
SIMULATED: dict[str, Any] = {
    "link": lambda dose: {"exchange_ms": dose},
    "synchronization": lambda dose: {"latency_ms": dose},
    "threads": lambda dose: {"contention_ms": dose},
    "imbalance": lambda dose: {"straggler_ms": dose, "straggler_rank": 1},
    # Two ranks of 4 workers on 4 cores: 10 ms of a lone device's loaders are hidden, twice not.
    "input": lambda dose: {"load_ms_per_sample": (10 + dose) * 4 / SHARE / 2, "host_cores": 4},
    # A fixed cost of one device is halved by two: half of it is lost to two-fold.
    "launch-bound": lambda dose: {"host_ms": 2 * dose},
}
ON_CPU = ("input", "imbalance", "link", "synchronization", "launch-bound")


def cases(asked: argparse.Namespace) -> Iterator[Case]:
    """Every cause at every dose, then healthy runs."""
    for cause in asked.cause:
        for dose in asked.doses:
            yield _case(asked, cause, dose, 0)
    for seed in range(asked.healthy):
        yield _case(asked, "", 0.0, seed)


def _case(asked: argparse.Namespace, cause: str, dose: float, seed: int) -> Case:
    if asked.on == "simulated":
        script = {**BASE, "noise_seed": seed, **(SIMULATED[cause](dose) if cause else {})}
        command = ["digits", "--framework", "simulated", "--device", "cuda", "--devices", "2"]
        command += ["--batch", str(2 * SHARE), "--workers", "4"]
        found = _explained(asked, command, NFOLD_SIMULATED=json.dumps(script))
        injected = dose
    else:
        planted = json.dumps({"cause": cause, "dose_ms": dose})
        command = ["planted:digits", "--devices", asked.on, "--strategy", "nfold"]
        found = _explained(asked, command, NFOLD_PLANTED=planted)
        # Two devices halve a step's fixed cost; each has half of the samples of the input.
        injected = dose / 2 if cause == "launch-bound" else dose
    case = _read(found, cause, injected)
    print(f"{cause or 'healthy'} {injected:g} ms: {case.attributed_ms:.2f} ms, {case.named}")
    return case


def _explained(asked: argparse.Namespace, command: list[str], **environment: str) -> Any:
    """The object that ``nfold explain --json`` prints, from a fresh results folder."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    told = ["--json", "--no-report", "--budget", asked.budget]
    with tempfile.TemporaryDirectory() as results:
        done = subprocess.run(
            [sys.executable, "-m", "nfold", "explain", *command, *told, "--results", results],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdout=subprocess.PIPE,
            stderr=None if asked.verbose else subprocess.DEVNULL,
            check=True,
        )
    return json.loads(done.stdout)


def _read(found: Any, cause: str, injected: float) -> Case:
    step = found["n_devices"]["step_ms"]["value"]
    # Lost input is a loss of one device too: both blocks count it.
    rows = [*found["budget"], *found["single_device_budget"]]
    named = tuple(
        dict.fromkeys(
            row["cause"]
            for row in rows
            if beyond(Interval(**row["lost_ms"]), step) and row["lost_ms"]["value"] > 0
        )
    )
    block = found["single_device_budget"] if _single(cause, found) else found["budget"]
    own = [row["lost_ms"]["value"] for row in block if row["cause"] == cause]
    return Case(
        cause=cause,
        injected_ms=injected,
        attributed_ms=sum(own),
        step_ms=step,
        unexplained_ms=found["unexplained_ms"]["value"],
        named=named,
    )


def _single(cause: str, found: Any) -> bool:
    """Without worker processes nothing hides the input, on one device or on several."""
    return bool(cause == "input" and found["plan"]["workers"] == 0)


def main(arguments: list[str] | None = None) -> list[Case]:
    """Run all cases and print the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--on", default="simulated", help="simulated, or CPU devices: cpu:2")
    parser.add_argument("--cause", action="append", help="of several, give it several times")
    parser.add_argument("--doses", default=",".join(map(str, DOSES)))
    parser.add_argument("--healthy", type=int, default=0, help="runs without any injection")
    parser.add_argument("--budget", default="3m", help="time of one explanation")
    parser.add_argument("--verbose", action="store_true", help="show every run")
    asked = parser.parse_args(arguments)
    known = tuple(SIMULATED) if asked.on == "simulated" else ON_CPU
    asked.cause = known if asked.cause is None else asked.cause
    unknown = sorted(set(asked.cause) - set(known))
    if unknown:
        parser.error(f"cause {unknown[0]!r}: on {asked.on} allowed are {', '.join(known)}")
    asked.doses = [float(dose) for dose in asked.doses.split(",") if dose]
    found = list(cases(asked))
    print("\n".join(["", *table(found)]))
    return found


if __name__ == "__main__":
    main()
