"""Measures what a machine does with the image files of a plan: a process that the parent asks.

    python -m nfold.frameworks.torch.rates

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
from nfold.ablation import Ablation
from nfold.data.part import Part
from nfold.errors import MachineUnfit, NfoldError
from nfold.frameworks.base import Observer, Task
from nfold.frameworks.photographs import photographs_of
from nfold.frameworks.torch.batch import Batch
from nfold.frameworks.torch.input import Key
from nfold.frameworks.torch.loop import train
from nfold.frameworks.torch.nvjpeg import Decoded, Files, torchvision_decode
from nfold.frameworks.torch.photographs import Photos
from nfold.lifeline import die_with_parent
from nfold.plain import from_plain, to_plain
from nfold.rates import InputRates, Rate, decoders

WINDOWS = 5
WINDOW_S = 0.12
AT_ONCE = 8
"""Photographs of one call of a worker."""
KEYS = 64
MOST_DECODED = 128
"""Photographs that nvJPEG gets at once, and that a device trains on."""
READY_S = 60.0
STEPS, WARM_UP = 8, 6
"""Of the device's own rate; a step becomes a graph, if it does, while it warms up."""


def measured(task: Task) -> InputRates:
    """The rates of a task's plan, whose ``decode`` is cpu, on the machine's first device."""
    size = workloads.parameters(task.workload)["size"]
    part = photographs_of(task.plan, workloads.parameters(task.workload)).train
    number = max(1, task.machine.cores - max(1, len(task.machine.gpus)))
    worker = worker_rate(Photos(part, task, size), len(part), number)
    share = min(MOST_DECODED, -(-(task.plan.batch or 1) // (task.plan.devices or 1)))
    decoder = None
    if task.plan.device == "cuda" and task.plan.augment == "device":
        decoder = decoder_rate(part, task, size, share)
    return InputRates(worker=worker, decoder=decoder, device=device_rate(task, share))


def keys_of(files: int, at_once: int) -> list[Key]:
    """Keys of random photographs."""
    draw = np.random.default_rng(0)
    ids = draw.integers(files, size=(KEYS, at_once))
    return [Key(0, each, at_once, at_once) for each in ids]


def worker_rate(batches: Dataset[Batch], files: int, number: int) -> Rate:
    """What one of ``number`` processes makes while all are at work."""
    context = multiprocessing.get_context("fork")
    ready, answers = context.Barrier(number), context.SimpleQueue()
    given = (batches, keys_of(files, AT_ONCE), ready, answers)
    forks = [context.Process(target=_work, args=given, daemon=True) for _ in range(number)]
    for fork in forks:
        fork.start()
    found = [answers.get() for _ in forks]
    if not all(found):
        raise MachineUnfit("a worker that was to be measured has failed")
    counts = np.sum(found, axis=0)
    return _rate([float(count) / WINDOW_S / number for count in counts])


def _work(
    batches: Dataset[Batch], keys: list[Key], ready: Barrier, answers: SimpleQueue[list[float]]
) -> None:
    """Answer the photographs made in each window, none at all after an error."""
    die_with_parent()
    torch.set_num_threads(1)
    made: list[float] = []
    try:
        batches[keys[0]]
        ready.wait(READY_S)
        made = _made(batches, keys)
    finally:
        answers.put(made)


def _made(batches: Dataset[Batch], keys: list[Key]) -> list[float]:
    """Photographs in every window; a call that ends in another one counts in both by its time."""
    marks = [0.0]
    started = time.monotonic()
    while marks[-1] < WINDOWS * WINDOW_S:
        batches[keys[len(marks) % len(keys)]]
        marks.append(time.monotonic() - started)
    edges = np.arange(WINDOWS + 1) * WINDOW_S
    done = AT_ONCE * np.interp(edges, marks, np.arange(len(marks)))
    counts: list[float] = np.diff(done).tolist()
    return counts


def decoder_rate(part: Part, task: Task, size: int, at_once: int) -> Rate | None:
    """What nvJPEG makes of files on one GPU, boxes cut out; None where there is none."""
    device = torch.device("cuda", 0)
    files = Files(part, task, size)
    given = [files[key].pin_memory() for key in keys_of(len(part), at_once)[: WINDOWS + 1]]
    try:
        land = Decoded(size, torchvision_decode())
        seconds = [_timed(partial(land, batch, device)) for batch in given]
    except (NfoldError, RuntimeError):
        return None
    return _rate([at_once / each for each in seconds[1:]])


def _timed(act: Callable[[], object]) -> float:
    started = time.monotonic()
    act()
    torch.cuda.synchronize()
    return time.monotonic() - started


def device_rate(task: Task, share: int) -> float | None:
    """What one device trains on when its images lie there; None where that does not fit."""
    plan = task.plan.edit(
        devices=1,
        strategy="single",
        batch=share,
        workers=decoders(task.plan),
        step=str(task.plan.step).replace("compiled+", "").replace("compiled", "eager"),
        kernels="default",
        accumulate=1,
        steps=STEPS,
        warmup_steps=WARM_UP,
    )
    alone = Task(
        workload=task.workload,
        plan=plan,
        machine=task.machine,
        ablation=Ablation(input="resident"),
    )
    try:
        windows = train(alone, Observer()).windows
    except (NfoldError, RuntimeError):
        return None
    return median(window.samples / window.seconds for window in windows)


def _rate(found: list[float]) -> Rate:
    return Rate(value=median(found), low=min(found), high=max(found))


def _answer(text: str) -> Any:
    try:
        return to_plain(measured(from_plain(Task, json.loads(text))))
    except NfoldError as error:
        return {"error": str(error)}


def main() -> None:
    """Entry of the process: its standard output is for the JSON object alone."""
    die_with_parent()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer.write(json.dumps(_answer(sys.stdin.read())))
    answer.close()


if __name__ == "__main__":
    main()
