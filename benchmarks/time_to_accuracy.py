"""Seconds of training until a test accuracy is reached, by devices, over seeds.

    python benchmarks/time_to_accuracy.py cnn10:peak=400 --target 0.93 --devices 1,2,4 \
        --out cnn10.json -- --batch 512 --epochs 24 --precision bf16 --step compiled+captured

What stands behind ``--`` goes to ``nfold train``. Trainings run side by side on GPUs of their own,
as many as there are; on CPU devices (``-- --device cpu``) one after the other. Seconds are those
of the epochs, the first of which searches, compiles and records; evaluations are not in them.
The file is written after every training.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from nfold.core.serialization import serialize
from nfold.telemetry.machine_inspection import inspect_machine

Gpus = tuple[int, ...]


def main(arguments: list[str]) -> None:
    """Train, keep what came of it, print the table."""
    asked = parsed(arguments)
    machine = inspect_machine()
    gpus = [] if "cpu" in asked.flags else [gpu.index for gpu in machine.gpus]
    record: dict[str, Any] = {
        "workload": asked.workload,
        "target": asked.target,
        "flags": asked.flags,
        "machine": serialize(machine),
        "trainings": [],
    }
    for devices in asked.devices:
        places = places_of(gpus, devices)
        with ThreadPoolExecutor(places.qsize()) as pool:
            runs = [pool.submit(train, asked, devices, s, places) for s in range(asked.seeds)]
            for run in runs:
                record["trainings"].append(run.result())
                asked.out.write_text(json.dumps(record, indent=1) + "\n")
        print(line(devices, asked.target, record["trainings"]), flush=True)


def places_of(gpus: list[int], devices: int) -> Queue[Gpus]:
    """Sets of GPUs that trainings on so many devices may have at the same time."""
    free: Queue[Gpus] = Queue()
    for start in range(0, len(gpus) - devices + 1, devices):
        free.put(tuple(gpus[start : start + devices]))
    if not free.qsize():
        free.put(())
    return free


def train(
    asked: argparse.Namespace, devices: int, seed: int, places: Queue[Gpus]
) -> dict[str, Any]:
    """One training on a free set of GPUs: its epochs, and the seconds of the whole command."""
    place = places.get()
    try:
        return trained(asked, devices, seed, place)
    finally:
        places.put(place)


def trained(asked: argparse.Namespace, devices: int, seed: int, gpus: Gpus) -> dict[str, Any]:
    visible = {"CUDA_VISIBLE_DEVICES": named(gpus)} if gpus else {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "nfold", "train", asked.workload, "--json"]
        command += ["--devices", str(devices), "--seed", str(seed), "--results", folder]
        started = time.monotonic()
        done = subprocess.run(
            [*command, "--checkpoint-every", "0", *asked.flags],
            env={**os.environ, **visible},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"training on {devices} devices, seed {seed}: exit {done.returncode}")
    epochs = json.loads(done.stdout)["epochs"]
    return {
        "devices": devices,
        "seed": seed,
        "command_s": time.monotonic() - started,
        "epochs": epochs,
        "seconds_to_target": reached(epochs, asked.target),
    }


def named(gpus: Gpus) -> str:
    """GPUs as CUDA_VISIBLE_DEVICES names them, out of those that are visible here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else None
    return ",".join(names[gpu] if names else str(gpu) for gpu in gpus)


def reached(epochs: list[dict[str, Any]], target: float) -> float | None:
    """Seconds of training until the end of the first epoch at the target, None where none is."""
    seconds = 0.0
    for epoch in epochs:
        seconds += epoch["seconds"]
        if epoch["accuracy"] >= target:
            return seconds
    return None


def line(devices: int, target: float, trainings: list[dict[str, Any]]) -> str:
    """``2 devices: 0.9312 0.9325 0.9318; to 0.93 12.1 13.0 12.4 s; all 15.2 s``."""
    own = [training for training in trainings if training["devices"] == devices]
    last = " ".join(f"{training['epochs'][-1]['accuracy']:.4f}" for training in own)
    to_target = [training["seconds_to_target"] for training in own]
    shown = " ".join("never" if s is None else f"{s:.1f}" for s in to_target)
    whole = statistics.median(sum(e["seconds"] for e in t["epochs"]) for t in own)
    return f"{devices} devices: accuracy {last}; s to {target}: {shown}; all epochs {whole:.1f} s"


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The command line; what is behind ``--`` becomes ``flags``."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("workload")
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--devices", type=counts, default=[1], help="for example 1,2,4")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(arguments[:cut])
    asked.flags = arguments[cut + 1 :]
    return asked


def counts(text: str) -> list[int]:
    """``1,2,4`` as numbers of devices."""
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main(sys.argv[1:])
