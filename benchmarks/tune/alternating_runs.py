"""Compares equal runs of a script in pairs: one after the other, and alternating.

Printed is the standard deviation of the logarithm of the ratio of their step times, which is 0
without noise, and the seconds that a pair of runs takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import tempfile
import time
from pathlib import Path
from statistics import fmean

from nfold.core.measurement import Measurement
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.explain.design import Trial
from nfold.launch.launch_spec import RunOptions, StartCallback
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.tune.runs.alternating_runs import log_ratio, run_alternating


def log_time(trial: Trial, measurement: Measurement) -> float:
    if measurement.status != "ok":
        raise SystemExit(f"{measurement.status}: {measurement.cause}")
    step_ms = trial.step_and_gap_ms(measurement)
    assert step_ms is not None
    return math.log(step_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("script", nargs="+", help="a script that trains in one process per device")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400, help="of a run, without its warm-up")
    parser.add_argument("--warm-up", type=int, default=10, help="steps")
    parser.add_argument("--workers", type=int, default=0, help="of the script's DataLoader")
    parser.add_argument("--pairs", type=int, default=8)
    asked = parser.parse_args()
    machine = inspect_machine()
    plan = Plan(
        device=asked.device,
        devices=asked.devices,
        strategy="single" if asked.devices == 1 else "ddp",
        steps=asked.steps,
        warmup_steps=asked.warm_up,
        workers=asked.workers,
        cores_per_device=max(1, machine.cores // asked.devices),
    )
    trial, workload = Trial(plan=plan), Workload.from_script(*asked.script)
    ratios: dict[str, list[float]] = {"one after the other": [], "alternating": []}
    seconds: dict[str, list[float]] = {name: [] for name in ratios}
    with tempfile.TemporaryDirectory() as results:

        def once(number: int, on_start: StartCallback | None = None) -> Measurement:
            options = RunOptions(results=Path(results))
            if on_start is not None:
                options = dataclasses.replace(options, alternates=True, on_start=on_start)
            return run(workload, plan, machine=machine, repeat=number, options=options)

        for number in range(0, 4 * asked.pairs, 4):
            begin = time.monotonic()
            first, second = (log_time(trial, once(number + one)) for one in (0, 1))
            middle = time.monotonic()
            pair = run_alternating(*(functools.partial(once, number + one) for one in (2, 3)))
            for each in pair:
                log_time(trial, each)
            ratios["one after the other"].append(second - first)
            ratios["alternating"].append(log_ratio(*((trial, one) for one in pair)))
            seconds["one after the other"].append(middle - begin)
            seconds["alternating"].append(time.monotonic() - middle)
            print({name: round(values[-1], 3) for name, values in ratios.items()}, flush=True)
    for name, values in ratios.items():
        deviation = math.sqrt(fmean(one * one for one in values))
        print(f"{name}: {deviation:.3f}, {fmean(seconds[name]):.0f} s per pair")


if __name__ == "__main__":
    main()
