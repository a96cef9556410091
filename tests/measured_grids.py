"""Whole grids of measurements made by hand, in a store, with telemetry beside them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import measured
from nfold.core.measurement import Caveat, FailureCause, Measurement, OperationPart, RankSamples
from nfold.store.store import Store


def training_grid() -> list[Measurement]:
    """Batches × 1, 2, 4 GPUs × strategies × layouts, with failures and doubts among them."""
    made = []
    for layout in ("channels_first", "channels_last"):
        for batch in (128, 512, 2048):
            for devices, strategy in ((1, "single"), (2, "ddp"), (2, "dp"), (4, "ddp"), (4, "dp")):
                made.append(_training_cell(layout, batch, devices, strategy))
    return made


def _training_cell(layout: str, batch: int, devices: int, strategy: str) -> Measurement:
    own = batch / devices
    lost = {"single": 1.0, "ddp": 0.93, "dp": 0.62}[strategy]
    rate = 75_000 * devices * own / (own + 160) * lost * (1.0 if "last" in layout else 0.8)
    more: dict[str, Any] = {}
    if batch == 2048 and devices == 1 and layout == "channels_first":
        text = "CUDA out of memory: tried to allocate 2.25 GiB, 1.10 GiB are free"
        more = {"status": "oom", "cause": FailureCause(text=text, rank=0, step=0)}
        more["ranks"] = (RankSamples(rank=0, device="cuda:0", peak_memory_bytes=140 * 2**30),)
    elif (batch, devices, strategy) == (512, 4, "dp"):
        more = {
            "status": "hung",
            "cause": FailureCause(text="rank 0 made no progress after step 212"),
        }
        more["ranks"] = ()
    elif (batch, devices, strategy) == (2048, 4, "ddp"):
        texts = ("GPU 2 was held back by its temperature for 31 % of the time",)
        more = {"doubts": tuple(Caveat(kind="throttled", text=text) for text in texts)}
    name = f"{layout}-{batch}-{devices}-{strategy}"
    return measured.measurement(
        rate=rate,
        noise=0.015,
        layout=layout,
        batch=batch,
        devices=devices,
        strategy=strategy,
        precision="bf16",
        epochs=3,
        energy_joules=4.0 * batch * devices,
        folder=f"measurements/{name}",
        **more,
    )


def cpu_grid(workload: str = "digits") -> list[Measurement]:
    """1 against 2 CPU devices, one batch, three repeats each; one of them was killed."""
    host = measured.cpu_machine()
    made = []
    for repeat in range(3):
        for devices in (1, 2):
            more: dict[str, Any] = {}
            if (repeat, devices) == (2, 2):
                cause = FailureCause(text="rank 1 was ended by SIGKILL", rank=1, signal=9)
                more = {"status": "killed", "cause": cause, "ranks": ()}
            folder = f"measurements/{workload}-{devices}-{repeat}"
            made.append(
                measured.measurement(
                    host,
                    workload=workload,
                    rate=2100.0 * (1.86 if devices == 2 else 1),
                    devices=devices,
                    cores_per_device=1,
                    batch=64,
                    epochs=3,
                    repeat=repeat,
                    folder=folder,
                    **more,
                )
            )
    return made


def operation_grid(devices: Iterable[int] = (1, 2, 4)) -> list[Measurement]:
    """conv2d in its parts on some numbers of devices, with baselines."""
    return [_operation(count) for count in devices]


def _operation(devices: int) -> Measurement:
    moved = 840 * 100 * 100 * 4
    parts: list[OperationPart] = [
        measured.part("first call", 850.0 + 40 * devices, bytes=2 * moved, note="with 1 warm-up"),
        measured.part("copy to device, pageable", 1.46 / devices + 0.4, bytes=moved),
        measured.part("copy to device, pinned", 0.61 / devices + 0.05, bytes=moved),
        measured.part("convolution, cold cache", 0.029 / devices + 0.006, bytes=2 * moved),
        measured.part("convolution, warm cache", 0.018 / devices + 0.005, bytes=2 * moved),
        measured.part("resident loop", 0.0153 / devices + 0.004, bytes=2 * moved),
        measured.part("copy from device, pinned", 0.60 / devices + 0.05, bytes=moved),
        measured.part("end to end, pageable", 4.9 / devices + 1.2, bytes=2 * moved),
        measured.part("end to end, pinned", 1.24 / devices + 0.15, bytes=2 * moved),
    ]
    one_call = (parts[0].__class__)(**{**vars(parts[0]), "seconds": parts[0].seconds[:1]})
    baselines = [
        measured.part("scipy.signal.convolve2d, 1 core", 138.0, baseline=True),
        measured.part("scipy.ndimage.convolve, 1 core", 44.0, baseline=True),
        measured.part(
            "torch on the CPU, 64 cores",
            1.9,
            images=420,
            baseline=True,
            note="on 420 of 840 images",
        ),
    ]
    host = measured.gpu_machine()
    plain = measured.measurement(
        host, workload="conv2d", rate=6e5 * devices**0.8, devices=devices, batch=840, steps=30
    )
    values = [vars(rank) for rank in plain.ranks]
    ranks = tuple(
        RankSamples(
            **{
                **rank,
                "epochs": (),
                "losses": (),
                "parts": (one_call, *parts[1:], *(baselines if rank["rank"] == 0 else ())),
            }
        )
        for rank in values
    )
    return measured.measurement(
        host, workload="conv2d", devices=devices, batch=840, steps=30, ranks=ranks
    )


def write_store(results: Path, made: Iterable[Measurement], *, telemetry: bool = True) -> None:
    """Append everything to the store, and write a telemetry file into every folder."""
    with Store.open(results) as store:
        for one in made:
            store.append(one)
            if telemetry and one.folder is not None:
                folder = results / one.folder
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "telemetry.csv").write_text(telemetry_csv(one))


def telemetry_csv(measurement: Measurement, seconds: int = 90) -> str:
    """A file as the sampler writes it, once a second, from monotonic second 90 on."""
    gpus = measurement.plan.devices or 1 if measurement.plan.device == "cuda" else 0
    ranks = measurement.plan.devices or 1
    head = ["monotonic_s", "utc", "host_cpu_percent", "host_disk_read_bytes_per_s"]
    head.append("host_other_load_percent")
    for g in range(gpus):
        head += [f"gpu{g}_{name}" for name in ("utilisation_percent", "memory_used_bytes")]
        head += [f"gpu{g}_{name}" for name in ("power_w", "temperature_c", "sm_clock_mhz")]
    head += [f"rank{r}_{name}" for r in range(ranks) for name in ("cpu_percent", "rss_bytes")]
    draw = random.Random(measurement.id)
    lines = [",".join(head)]
    for second in range(seconds):
        busy = 1.0 if 8 <= second < seconds - 6 else 0.05
        values: list[Any] = [90.0 + second, "2026-11-21T06:00:00Z", 35 + 10 * draw.random(), 0, ""]
        for g in range(gpus):
            load = busy * (88 - 6 * g + 8 * draw.random() + 3 * math.sin(second / 5))
            values += [round(min(100, load)), int((2 + 20 * busy) * 2**30), 90 + 5.2 * load, 60, ""]
        for _ in range(ranks):
            values += [busy * (95 + 5 * draw.random()), int(1.5 * 2**30)]
        lines.append(",".join(map(str, values)))
    return "\n".join(lines) + "\n"
