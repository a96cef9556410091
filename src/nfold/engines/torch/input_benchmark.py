"""Measures what a machine does with the image files of a plan: a process that the parent asks.

    python -m nfold.engines.torch.input_benchmark

reads a task as JSON and prints one JSON object, ``InputRates`` or ``{"error": ...}``. Workers are
measured before CUDA is touched: they are forks, as a loader's are.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from nfold import workloads
from nfold.core.errors import MachineUnfit, NfoldError
from nfold.core.input_rates import ImageRate, InputRates, max_decoding_workers
from nfold.core.parent_death import die_with_parent
from nfold.core.serialization import deserialize, serialize
from nfold.core.variant import Variant
from nfold.data.packed_jpegs import PackedJpegs
from nfold.engines.base import Observer, Task
from nfold.engines.builtin_workloads import load_photographs
from nfold.engines.torch.batch import Batch
from nfold.engines.torch.input.dataloader import BatchKey
from nfold.engines.torch.input.image_files import (
    ImageBatches,
    JpegBatches,
    NvjpegTransfer,
    torchvision_decoder,
)
from nfold.engines.torch.trainer import train

WINDOW_COUNT = 5
WINDOW_S = 0.12
WORKER_BATCH = 8
"""Photographs of one call of a worker."""
KEY_COUNT = 64
MAX_DEVICE_BATCH = 128
"""Photographs that nvJPEG gets at once, and that a device trains on."""
START_TIMEOUT_S = 60.0
DEVICE_STEPS, DEVICE_WARMUP_STEPS = 8, 6
"""Of the device's own rate; a step becomes a graph, if it does, while it warms up."""


def measure_rates(task: Task) -> InputRates:
    """The rates of a task's plan, whose ``decode`` is cpu, on the machine's first device."""
    size = workloads.parameters(task.workload)["size"]
    part = load_photographs(task.plan, workloads.parameters(task.workload)).train
    number = max(1, task.machine.cores - max(1, len(task.machine.gpus)))
    worker = measure_worker(ImageBatches(part, task, size), len(part), number)
    share = min(MAX_DEVICE_BATCH, -(-(task.plan.batch or 1) // (task.plan.devices or 1)))
    decoder = None
    if task.plan.device == "cuda" and task.plan.augment == "device":
        decoder = measure_decoder(part, task, size, share)
    return InputRates(worker=worker, decoder=decoder, device=measure_device(task, share))


def random_keys(files: int, batch_size: int) -> list[BatchKey]:
    """Keys of random photographs."""
    draw = np.random.default_rng(0)
    ids = draw.integers(files, size=(KEY_COUNT, batch_size))
    return [BatchKey(0, each, batch_size, batch_size) for each in ids]


def measure_worker(batches: Dataset[Batch], files: int, number: int) -> ImageRate:
    """What one of ``number`` processes makes while all are at work."""
    context = multiprocessing.get_context("fork")
    ready, answers = context.Barrier(number), context.SimpleQueue()
    given = (batches, random_keys(files, WORKER_BATCH), ready, answers)
    forks = [context.Process(target=_worker_main, args=given, daemon=True) for _ in range(number)]
    for fork in forks:
        fork.start()
    found = [answers.get() for _ in forks]
    if not all(found):
        raise MachineUnfit("a worker that was to be measured has failed")
    counts = np.sum(found, axis=0)
    return _summarize([float(count) / WINDOW_S / number for count in counts])


def _worker_main(
    batches: Dataset[Batch], keys: list[BatchKey], ready: Barrier, answers: SimpleQueue[list[float]]
) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    made: list[float] = []
    try:
        batches[keys[0]]
        ready.wait(START_TIMEOUT_S)
        made = _images_per_window(batches, keys)
    finally:
        answers.put(made)


def _images_per_window(batches: Dataset[Batch], keys: list[BatchKey]) -> list[float]:
    marks = [0.0]
    started = time.monotonic()
    while marks[-1] < WINDOW_COUNT * WINDOW_S:
        batches[keys[len(marks) % len(keys)]]
        marks.append(time.monotonic() - started)
    edges = np.arange(WINDOW_COUNT + 1) * WINDOW_S
    done = WORKER_BATCH * np.interp(edges, marks, np.arange(len(marks)))
    counts: list[float] = np.diff(done).tolist()
    return counts


def measure_decoder(part: PackedJpegs, task: Task, size: int, batch_size: int) -> ImageRate | None:
    """What nvJPEG makes of files on one GPU, boxes cut out; None where there is none."""
    device = torch.device("cuda", 0)
    files = JpegBatches(part, task, size)
    given = [
        files[key].pin_memory() for key in random_keys(len(part), batch_size)[: WINDOW_COUNT + 1]
    ]
    try:
        land = NvjpegTransfer(size, torchvision_decoder())
        seconds = [_time_call(partial(land, batch, device)) for batch in given]
    except (NfoldError, RuntimeError):
        return None
    return _summarize([batch_size / each for each in seconds[1:]])


def _time_call(act: Callable[[], object]) -> float:
    started = time.monotonic()
    act()
    torch.cuda.synchronize()
    return time.monotonic() - started


def measure_device(task: Task, share: int) -> float | None:
    """What one device trains on when its images lie there; None where that does not fit."""
    plan = task.plan.edit(
        devices=1,
        strategy="single",
        batch=share,
        workers=max_decoding_workers(task.plan),
        step=str(task.plan.step).replace("compiled+", "").replace("compiled", "eager"),
        kernels="default",
        accumulate=1,
        steps=DEVICE_STEPS,
        warmup_steps=DEVICE_WARMUP_STEPS,
    )
    alone = Task(
        workload=task.workload,
        plan=plan,
        machine=task.machine,
        requested_variant=Variant(input="resident"),
    )
    try:
        windows = train(alone, Observer()).windows
    except (NfoldError, RuntimeError):
        return None
    return median(window.samples / window.seconds for window in windows)


def _summarize(found: list[float]) -> ImageRate:
    return ImageRate(value=median(found), low=min(found), high=max(found))


def _handle_request(text: str) -> Any:
    try:
        return serialize(measure_rates(deserialize(Task, json.loads(text))))
    except NfoldError as error:
        return {"error": str(error)}


def main() -> None:
    """Entry of the process: its standard output is for the JSON object alone."""
    die_with_parent()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer.write(json.dumps(_handle_request(sys.stdin.read())))
    answer.close()


if __name__ == "__main__":
    main()
