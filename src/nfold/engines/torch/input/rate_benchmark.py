"""Measures the rates at which this machine reads the image files of a plan, in a process of its own.

python -m nfold.engines.torch.input.rate_benchmark

reads a task as JSON and prints one JSON object, ``InputRates`` or ``{"error": ...}``. Workers are
measured before CUDA starts: they are forks, as a loader's are.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from nfold import workloads
from nfold.core.child_process import die_with_parent, take_stdout
from nfold.core.errors import MachineUnfit, NfoldError
from nfold.core.input_rates import ImageRate, InputRates, max_decoding_workers
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
WORKER_BATCH = 8  # photographs per call of a worker
KEY_COUNT = 64
MAX_DEVICE_BATCH = 128  # photographs per call of nvJPEG, and per training step
START_TIMEOUT_S = 60.0
# steps of the device's own rate; a captured step is recorded during warm-up
DEVICE_STEPS, DEVICE_WARMUP_STEPS = 8, 6


def measure_rates(task: Task) -> InputRates:
    """Return the rates of a task's plan, whose ``decode`` is cpu, on the first device."""
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
    draw = np.random.default_rng(0)
    ids = draw.integers(files, size=(KEY_COUNT, batch_size))
    return [BatchKey(0, each, batch_size, batch_size) for each in ids]


def measure_worker(batches: Dataset[Batch], files: int, number: int) -> ImageRate:
    """Return the images per second of one of ``number`` worker processes, all busy."""
    context = multiprocessing.get_context("fork")
    ready, answers = context.Barrier(number), context.SimpleQueue()
    arguments = (batches, random_keys(files, WORKER_BATCH), ready, answers)
    for _ in range(number):
        context.Process(target=_worker_main, args=arguments, daemon=True).start()
    counts_by_worker = [answers.get() for _ in range(number)]
    if not all(counts_by_worker):
        raise MachineUnfit("a measured worker process failed")
    counts = np.sum(counts_by_worker, axis=0)
    return _summarize([float(count) / WINDOW_S / number for count in counts])


def _worker_main(
    batches: Dataset[Batch], keys: list[BatchKey], ready: Barrier, answers: SimpleQueue[list[float]]
) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    counts: list[float] = []
    try:
        batches[keys[0]]
        ready.wait(START_TIMEOUT_S)
        counts = _images_per_window(batches, keys)
    finally:
        answers.put(counts)


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
    """Return the images per second of nvJPEG with cropping, on one GPU; None without it."""
    device = torch.device("cuda", 0)
    files = JpegBatches(part, task, size)
    keys = random_keys(len(part), batch_size)[: WINDOW_COUNT + 1]
    batches = [files[key].pin_memory() for key in keys]
    seconds = []
    try:
        transfer = NvjpegTransfer(size, torchvision_decoder())
        for batch in batches:
            started = time.monotonic()
            transfer(batch, device)
            torch.cuda.synchronize()
            seconds.append(time.monotonic() - started)
    except (NfoldError, RuntimeError):
        return None
    return _summarize([batch_size / each for each in seconds[1:]])


def measure_device(task: Task, share: int) -> float | None:
    """Return the samples per second of training on resident images; None if they do not fit."""
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
    one_device = Task(
        workload=task.workload,
        plan=plan,
        machine=task.machine,
        requested_variant=Variant(input="resident"),
    )
    try:
        windows = train(one_device, Observer()).windows
    except (NfoldError, RuntimeError):
        return None
    return median(window.samples / window.seconds for window in windows)


def _summarize(found: list[float]) -> ImageRate:
    return ImageRate(value=median(found), low=min(found), high=max(found))


def main() -> None:
    """Run the process. Its standard output is for the JSON object only."""
    die_with_parent()
    answer = take_stdout()
    reply: Any
    try:
        reply = serialize(measure_rates(deserialize(Task, json.load(sys.stdin))))
    except NfoldError as error:
        reply = {"error": str(error)}
    answer.write(json.dumps(reply))
    answer.close()


if __name__ == "__main__":
    main()
