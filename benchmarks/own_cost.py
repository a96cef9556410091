"""nfold's own cost: the same training steps with and without its observation, interleaved.

    python benchmarks/own_cost.py [--device cuda|cpu] [--workload digits] [--batch 64] [--blocks 40]

Both arms run the very same step function on the same model in the same process. The observed
arm does what every measurement does: an event or a clock reading per step, heartbeats in a
memory map, losses kept on the device and read at each window's end, sample hashes, samples
saved to a file. The bare arm only fences the device before and after its block. Blocks of
both arms alternate; the ratio is formed pair by pair, its interval bootstrapped over pairs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nfold.core.plan import Plan
from nfold.core.serialization import serialize
from nfold.core.stats import bootstrap, paired_ratio
from nfold.core.workload import Workload
from nfold.engines.base import Observer, Task
from nfold.engines.rank_process import pin_to_cores
from nfold.launch.handoff import HandoffFolder
from nfold.launch.workload_process import FolderObserver
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.workloads import info

BLOCK_STEPS = 100
WINDOW_STEPS = 20
"""As in a run of --steps 200: ten windows."""
Block = Callable[[], float]
"""Trains a block; returns its seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default=None)
    parser.add_argument("--workload", default="digits")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=40)
    arguments = parser.parse_args()
    machine = inspect_machine()
    workload = Workload.parse(arguments.workload)
    asked = Plan(device=arguments.device, devices=1, batch=arguments.batch, steps=BLOCK_STEPS)
    plan = asked.edit(workers=4 if machine.gpus and arguments.device != "cpu" else 0)
    plan = plan.resolve(machine, info(workload.name).defaults)
    task = Task(workload=workload, plan=plan, machine=machine)
    with tempfile.TemporaryDirectory() as name, pin_to_cores(plan, 0):
        folder = HandoffFolder(Path(name))
        folder.write_task(task)
        observer = FolderObserver(folder, 0)
        result = measure(task, observer, arguments.blocks)
    print(json.dumps(result))


def measure(task: Task, observer: Observer, blocks: int) -> dict[str, object]:
    """Alternate observed and bare blocks; the first of each warms up and is thrown away."""
    from nfold.engines.recorder import Recorder, RunLength
    from nfold.engines.torch.devices import build_clock, open_devices
    from nfold.engines.torch.trainer import Trainer, read_losses

    devices = open_devices(task)
    trainer = Trainer(task, devices)
    trainer.model.train()
    batches = itertools.cycle(list(itertools.islice(trainer.source, BLOCK_STEPS)))
    length = RunLength(total=2 * BLOCK_STEPS * (blocks + 1), warmup=1, window=WINDOW_STEPS)
    recorder = Recorder(0, devices.describe(), build_clock(devices), observer, length, read_losses)

    def observed() -> float:
        started = time.perf_counter()
        recorder.begin_epoch()
        for batch in itertools.islice(batches, BLOCK_STEPS):
            loss = trainer.step(batch)
            recorder.record_steps(1, batch.count, batch.sample_hash, loss)
        recorder.end_epoch()
        return time.perf_counter() - started

    def bare() -> float:
        devices.synchronize()
        started = time.perf_counter()
        for batch in itertools.islice(batches, BLOCK_STEPS):
            trainer.step(batch)
        devices.synchronize()
        return time.perf_counter() - started

    pairs = list(alternating(observed, bare, blocks + 1))[1:]
    with_nfold, without = zip(*pairs, strict=True)
    per_step = [1e3 * seconds / BLOCK_STEPS for seconds in without]
    ratio = paired_ratio(with_nfold, without)
    return {
        "device": devices.describe(),
        "workload": str(task.workload),
        "batch": task.plan.batch,
        "bare_step_ms": serialize(bootstrap(per_step)),
        "observed_over_bare": serialize(ratio),
        "pairs": blocks,
    }


def alternating(first: Block, second: Block, pairs: int) -> Iterator[tuple[float, float]]:
    """Seconds of both, pair by pair, the order within a pair swapping each time."""
    for pair in range(pairs):
        if pair % 2 == 0:
            a = first()
            b = second()
        else:
            b = second()
            a = first()
        yield a, b


if __name__ == "__main__":
    main()
