"""What glibc's malloc costs ranks on CPU devices: default settings against nfold's, interleaved.

    python benchmarks/cpu_malloc.py [--pairs 5]

A small convolution network trains on one core, and on two cores in two processes at once with
half the batch each and no exchange. By default glibc returns every freed tensor above 128 KiB
to the kernel; two processes then contend for page faults. Every arm runs in fresh processes;
arms alternate; ratios are formed pair by pair.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from nfold.core.serialization import serialize
from nfold.core.stats import bootstrap, paired_ratio
from nfold.launch.launch_spec import CPU_MALLOC_ENVIRONMENT

STEP = """
import os, sys, time
os.sched_setaffinity(0, [int(sys.argv[1])])
import torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
    nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10),
)
images = torch.rand(int(sys.argv[2]), 1, 8, 8)
for step in range(220):
    if step == 20:
        started = time.monotonic()
    model(images).sum().backward()
print(1e3 * (time.monotonic() - started) / 200)
"""


def step_ms(processes: int, environment: dict[str, str]) -> float:
    """Milliseconds of a step of 128 images over ``processes``, the slowest one's."""
    cores = sorted(os.sched_getaffinity(0))[:processes]
    command = [sys.executable, "-c", STEP]
    started = [
        subprocess.Popen(
            [*command, str(core), str(128 // processes)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for core in cores
    ]
    return max(float(process.communicate()[0]) for process in started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    found: dict[tuple[int, str], list[float]] = {}
    for _ in range(pairs):
        for processes in (1, 2):
            for name, environment in (("default", {}), ("kept", CPU_MALLOC_ENVIRONMENT)):
                ms = step_ms(processes, environment)
                found.setdefault((processes, name), []).append(ms)
    for processes in (1, 2):
        default, kept = found[processes, "default"], found[processes, "kept"]
        row = {
            "processes": processes,
            "default_step_ms": serialize(bootstrap(default)),
            "kept_step_ms": serialize(bootstrap(kept)),
            "default_over_kept": serialize(paired_ratio(default, kept)),
        }
        print(json.dumps(row))
    for name in ("default", "kept"):
        speedup = paired_ratio(found[1, name], found[2, name])
        print(json.dumps({"arm": name, "speedup_at_2": serialize(speedup)}))


if __name__ == "__main__":
    main()
