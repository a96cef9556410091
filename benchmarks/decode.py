"""JPEG decoders and both placements of the distortion: images per second of one core.

    python benchmarks/decode.py [--images 96] [--rounds 7]

Every arm goes through the same photographs once a round, in random order within the round, pinned
to one core; the interval is a bootstrap over rounds. Reads the photographs of NFOLD_DATA.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable

import numpy as np

from nfold.core.stats import bootstrap
from nfold.data import photographs
from nfold.data.packed_jpegs import PackedJpegs, decode_jpeg, decode_with_pillow

Arm = Callable[[int], object]


def arms(part: PackedJpegs) -> dict[str, Arm]:
    """What is compared, by name; what is not installed is left out."""
    sizes = part.sizes.tolist()
    found: dict[str, Arm] = {}
    for by in (1, 2, 4, 8):
        scale = "" if by == 1 else f" at 1/{by}"
        found[f"simplejpeg{scale}"] = lambda i, by=by: decode_jpeg(part.jpeg(i), *sizes[i], by)
        found[f"Pillow{scale}"] = lambda i, by=by: decode_with_pillow(part.jpeg(i), *sizes[i], by)
        found |= opencv(part, by, scale)
    return found | turbojpeg(part)


def opencv(part: PackedJpegs, by: int, scale: str) -> dict[str, Arm]:
    import cv2

    cv2.setNumThreads(1)
    reduced = cv2.IMREAD_COLOR if by == 1 else getattr(cv2, f"IMREAD_REDUCED_COLOR_{by}")
    flags = reduced | cv2.IMREAD_IGNORE_ORIENTATION
    return {f"OpenCV{scale}": lambda i: cv2.imdecode(part.jpeg(i), flags)}


def turbojpeg(part: PackedJpegs) -> dict[str, Arm]:
    try:
        from turbojpeg import TJPF_RGB, TurboJPEG

        decoder = TurboJPEG()
    except (ImportError, RuntimeError) as error:
        print(f"PyTurboJPEG left out: {str(error).splitlines()[0]}")
        return {}
    return {"PyTurboJPEG": lambda i: decoder.decode(part.jpeg(i).tobytes(), pixel_format=TJPF_RGB)}


def placements(part: PackedJpegs, size: int) -> dict[str, Arm]:
    """A loader's worker with everything on the CPU, and with the distortion left to the device."""
    import torch

    from nfold.core.plan import Plan, WorkloadDefaults
    from nfold.core.workload import Workload
    from nfold.engines.base import Task
    from nfold.engines.torch.input.dataloader import BatchKey
    from nfold.engines.torch.input.image_files import ImageBatches
    from nfold.telemetry.machine_inspection import inspect_machine

    torch.set_num_threads(1)
    machine = inspect_machine()
    found: dict[str, Arm] = {}
    for augment in ("cpu", "device"):
        plan = Plan(device="cpu", devices=1, augment=augment).resolve(
            machine, WorkloadDefaults(batch=32, epochs=1, encoded=True)
        )
        task = Task(workload=Workload(name="inception_v3"), plan=plan, machine=machine)
        photos = ImageBatches(part, task, size)
        found[f"worker, augment {augment}, {size}"] = lambda i, photos=photos: photos[
            BatchKey(0, np.arange(32 * i, 32 * i + 32), 32, 32)
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=299)
    given = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    part = photographs.load().train.first(given.images)
    print(f"{len(part)} photographs of {part.sizes.mean(axis=0).round()} pixels in the mean")
    per_call = {name: (arm, 1) for name, arm in arms(part).items()}
    per_call |= {name: (arm, 32) for name, arm in placements(part, given.size).items()}
    rates: dict[str, list[float]] = {name: [] for name in per_call}
    for _ in range(given.rounds):
        for name in random.sample(list(per_call), len(per_call)):
            arm, images = per_call[name]
            calls = max(1, len(part) // images)
            started = time.perf_counter()
            for call in range(calls):
                arm(call)
            rates[name].append(calls * images / (time.perf_counter() - started))
    for name, found in rates.items():
        rate = bootstrap(found)
        print(f"{name:32} {rate.value:7.0f} images/s ({rate.low:.0f} to {rate.high:.0f})")


if __name__ == "__main__":
    main()
