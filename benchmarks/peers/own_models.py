"""Careful DDP, ``nfold.Run`` and its peers on models that are not built in, interleaved.

    python benchmarks/peers/own_models.py resnet18,gpt2 --devices 1,2 --out own_models.json

The models are those of own_model_zoo.py: ResNet-18 in its CIFAR form, ResNet-50, ViT-S/16, GPT-2 124M
and BERT-base, on synthetic samples that are on the devices. The arms are careful DDP, eager and
compiled; ``nfold.Run`` without flags, with ``plan="safe"``, with plans chosen by hand, and as
replicas without communication; Lightning Fabric and Accelerate. All arms of a model are alive
together and train in turns, a window each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import fleet
from fleet import Arm, Kind, Spec, Work, stop_all
from own_model_zoo import MODELS
from peers import Record, counts
from results import table
from rounds import Pace, measure, started

fleet.KINDS["own_model"] = Kind("own_model_arm.py", "one each")
fleet.KINDS["jax_gpt2"] = Kind("own_model_jax.py", "one device")
ARMS: dict[str, dict[str, str]] = {
    "ddp": {"loop": "ddp"},
    "ddp compiled": {"loop": "ddp", "compile": "1"},
    "run": {"loop": "run"},
    "run @step": {"loop": "run", "decorate": "1"},
    "run safe": {"loop": "run", "plan": "safe"},
    "run compiled": {"loop": "run", "step": "compiled"},
    "run compiled+captured": {"loop": "run", "step": "compiled+captured"},
    "run @step captured": {"loop": "run", "decorate": "1", "step": "captured"},
    "run @step compiled+captured": {"loop": "run", "decorate": "1", "step": "compiled+captured"},
    "replicas @step": {"loop": "run", "decorate": "1", "replicas": "1"},
    "fabric": {"loop": "fabric"},
    "accelerate": {"loop": "accelerate"},
}
CHOOSING = [tuple(ARMS[name].items()) for name in ("run", "run @step", "replicas @step")]


def main() -> None:
    asked = parsed()
    asked.logs.mkdir(parents=True, exist_ok=True)
    record = Record.of(asked)
    try:
        for devices in asked.devices:
            for group in asked.models:
                measure_models(group.split("+"), devices, asked, record)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the file has what was measured\n")
    finally:
        record.save()


def measure_models(
    names: list[str], devices: int, asked: argparse.Namespace, record: Record
) -> None:
    """Start the arms of all models, then measure model by model."""
    pace = Pace(
        rounds=asked.rounds,
        window_s=asked.window_seconds,
        settle_s=0.1,
        ready_s=asked.ready_seconds,
    )
    arms: dict[str, list[Arm]] = {}
    for name in names:
        work = Work(
            workload=name,
            batch=asked.batch or MODELS[name].batch,
            device=asked.device,
            devices=devices,
            warmup=asked.warmup,
        )
        specs = [Spec(f"{name} {arm}", "own_model", tuple(ARMS[arm].items())) for arm in asked.arms]
        if asked.jax and name == "gpt2":
            specs.append(Spec("gpt2 jax", "jax_gpt2", ()))
        arms[name] = [Arm(spec, work, asked.logs) for spec in specs]
    left = [arm for group in arms.values() for arm in group]
    try:
        # While nfold measures which step is faster, no other arm starts.
        choosing = [arm for arm in left if arm.spec.fields in CHOOSING]
        started([arm for arm in left if arm not in choosing], pace, one_by_one=asked.one_by_one)
        started(choosing, pace, one_by_one=True)
        for name, group in arms.items():
            windows, keep = record.add_run(group[0].work, group)
            measure(group, pace, keep)
            stop_all(group)
            left = [arm for arm in left if arm not in group]
            names = [arm.spec.name for arm in group]
            baselines = [one for one in names if " ddp" in one or " replicas" in one]
            sys.stdout.write(f"{name} on {devices} × {asked.device}, samples/s\n")
            sys.stdout.write(table(group, windows, baselines) + "\n\n")
            sys.stdout.flush()
    finally:
        stop_all(left)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "models", type=lambda text: text.split(","), help="comma-separated; a+b start together"
    )
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS))
    parser.add_argument("--devices", type=counts, default=[1])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, help="samples per device; default: the model's")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--window-seconds", type=float, default=1.0)
    parser.add_argument("--ready-seconds", type=float, default=240.0)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--jax", action="store_true", help="an arm in JAX beside those of GPT-2")
    parser.add_argument("--one-by-one", action="store_true", help="start arms one after the other")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path)
    found: Any = parser.parse_args()
    found.logs = found.logs or found.out.with_suffix(".logs")
    names = {name for group in found.models for name in group.split("+")}
    for unknown in sorted(names - set(MODELS)) + sorted(set(found.arms) - set(ARMS)):
        parser.error(f"{unknown}: allowed are {', '.join((*MODELS, *ARMS))}")
    return found  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
