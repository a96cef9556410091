"""The five field reports: their grids, as axes that a user could type, and their builders."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nfold.analysis.cells import group_cells
from nfold.analysis.comparison import CellResult, compute_results
from nfold.bench.grid import GridAxes, parse_axes
from nfold.core.errors import UnknownValue, UsageError
from nfold.core.machine import Machine
from nfold.core.measurement import Measurement
from nfold.core.plan import Plan, powers_of_two
from nfold.fieldreports import (
    cifar_scaling,
    conv2d_devices,
    inception_input,
    layout_comparison,
    mirrored_mnist,
)
from nfold.fieldreports.sheets import CIFAR_EPOCHS, FieldReport


@dataclass(frozen=True)
class ReportGrid:
    """One grid of a report: a workload, comma-separated lists by axis, and a length.

    Device counts outside ``min_devices`` to ``max_devices`` are excluded. With ``epochs_per_device``
    N devices train N times the epochs: with a batch per device, the steps of one device.
    """

    workload: str
    axes: Mapping[str, str] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    scaling: str = "strong"
    steps: int | None = None
    epochs: int | None = None
    warmup_steps: int | None = None
    min_devices: int = 1
    max_devices: int | None = None
    epochs_per_device: bool = False


@dataclass(frozen=True)
class FieldReportSpec:
    """A field report as grids that run as one sweep; ``quick`` is for a machine of two cores."""

    name: str
    build: Callable[[Sequence[CellResult]], FieldReport]
    full: tuple[ReportGrid, ...]
    quick: tuple[ReportGrid, ...]
    repeats: int = 1

    def grids(self, *, quick: bool) -> tuple[ReportGrid, ...]:
        return self.quick if quick else self.full


TORCH, OTHERS = {"framework": "torch"}, {"framework": "tensorflow,jax"}
ALL_FRAMEWORKS = {"framework": "torch,tensorflow,jax"}
FEW_IMAGES = {"batch": "42"}  # other libraries take seconds for a convolution on a CPU

TUTORIAL = "mnist:samples=8000"  # 80 steps of 100 images: 125 epochs are 10,000 steps
SHORT_TUTORIAL = "mnist:samples=6000"
TUTORIAL_AXES = {**ALL_FRAMEWORKS, "batch": "100"}
WEAK: dict[str, Any] = {"scaling": "weak", "min_devices": 2}
OTHER_INPUTS = {"framework": "tensorflow", "batch": "100", "input": "generator,tf.data"}

ON_BOTH = {"augment": "cpu,device", "decode": "cpu,device"}
ON_CPU = {"augment": "cpu,device", "decode": "cpu"}
BF16_BATCH = {"batch": "128", "precision": "bf16"}
SMALL_INCEPTION = "inception_v3:samples=32,size=107"

ONE_BATCH, TWO_BATCHES = {"batch": "128"}, {"batch": "32,128"}
CIFAR_BATCHES = {"batch": "128,256,512,1024,2048"}
STRATEGIES = {"strategy": "dp,ddp,nfold"}
TORCH_ON_CIFAR, OTHERS_ON_CIFAR = TORCH | CIFAR_BATCHES | STRATEGIES, OTHERS | CIFAR_BATCHES
WIDE_RESNET, SMALL_RESNET = "wide_resnet:depth=28,width=10", "wide_resnet:depth=10,width=1"
SMALL_CNN = "cnn10:samples=256,test_samples=256"
BRIEF: dict[str, Any] = {"epochs": 2, "warmup_steps": 1}
BRIEF_RESNET = f"{SMALL_RESNET},samples=512,test_samples=512"

LAYOUTS = {"layout": "channels_first,channels_last"}
PRECISE_LAYOUTS = {"precision": "fp32,tf32,bf16"} | LAYOUTS
BATCH_64 = {"batch": "64"}
SHORT_ON_ONE: dict[str, Any] = {"steps": 10, "warmup_steps": 2, "max_devices": 1}
SHORTEST_ON_ONE: dict[str, Any] = {"steps": 6, "warmup_steps": 1, "max_devices": 1}

FIELD_REPORTS: dict[str, FieldReportSpec] = {
    report.name: report
    for report in (
        FieldReportSpec(
            "conv2d-devices",
            conv2d_devices.conv2d_report,
            full=(
                ReportGrid("conv2d", TORCH, steps=30),
                ReportGrid("conv2d", TORCH, ("filter=3,10", "channels=1,10"), steps=30),
                ReportGrid("conv2d:copy_only=1", TORCH, steps=30),
                ReportGrid("conv2d", OTHERS, steps=30),
            ),
            quick=(
                ReportGrid("conv2d", steps=10, warmup_steps=2),
                ReportGrid("conv2d:filter=10", FEW_IMAGES, steps=3, warmup_steps=1),
                ReportGrid("conv2d:channels=10", FEW_IMAGES, steps=3, warmup_steps=1),
                ReportGrid("conv2d:copy_only=1", steps=10, warmup_steps=2),
            ),
        ),
        FieldReportSpec(
            "mirrored-mnist",
            mirrored_mnist.mnist_report,
            full=(
                ReportGrid(TUTORIAL, TUTORIAL_AXES, epochs=125),
                ReportGrid(TUTORIAL, TUTORIAL_AXES, epochs=125, epochs_per_device=True, **WEAK),
                ReportGrid(TUTORIAL, OTHER_INPUTS, epochs=125),
            ),
            quick=(
                ReportGrid(SHORT_TUTORIAL, TUTORIAL_AXES, epochs=3),
                ReportGrid(SHORT_TUTORIAL, TUTORIAL_AXES, epochs=3, **WEAK),
                ReportGrid(SHORT_TUTORIAL, OTHER_INPUTS, epochs=3, min_devices=2),
            ),
        ),
        FieldReportSpec(
            "inception-input",
            inception_input.inception_report,
            full=(
                ReportGrid("inception_v3", {"batch": "32"} | ON_BOTH, steps=100),
                ReportGrid("inception_v3", BF16_BATCH | ON_BOTH, scaling="weak", steps=100),
            ),
            quick=(ReportGrid(SMALL_INCEPTION, {"batch": "8"} | ON_CPU, steps=6, warmup_steps=1),),
        ),
        FieldReportSpec(
            "cifar-scaling",
            cifar_scaling.cifar_report,
            full=tuple(
                ReportGrid(model, axes, epochs=CIFAR_EPOCHS)
                for model in ("cnn10", WIDE_RESNET)
                for axes in (TORCH_ON_CIFAR, OTHERS_ON_CIFAR)
            ),
            quick=(
                ReportGrid(SMALL_CNN, TORCH | TWO_BATCHES | STRATEGIES, **BRIEF),
                ReportGrid(SMALL_CNN, OTHERS | ONE_BATCH, **BRIEF),
                ReportGrid(BRIEF_RESNET, TORCH | ONE_BATCH | {"strategy": "nfold"}, **BRIEF),
            ),
        ),
        FieldReportSpec(
            "layout",
            layout_comparison.layout_report,
            full=(
                ReportGrid("cnn10", ALL_FRAMEWORKS | {"batch": "512"} | PRECISE_LAYOUTS, steps=200),
                ReportGrid(WIDE_RESNET, ALL_FRAMEWORKS | ONE_BATCH | PRECISE_LAYOUTS, steps=100),
            ),
            quick=(
                ReportGrid(SMALL_RESNET, TORCH | BATCH_64 | LAYOUTS, steps=10, warmup_steps=2),
                ReportGrid(SMALL_RESNET, OTHERS | BATCH_64 | LAYOUTS, **SHORT_ON_ONE),
                ReportGrid("cnn10", TORCH | {"batch": "16"} | LAYOUTS, **SHORTEST_ON_ONE),
            ),
            repeats=3,
        ),
    )
}


def find_report(name: str) -> FieldReportSpec:
    """Return the report of that name; raises UnknownValue with the names."""
    if name not in FIELD_REPORTS:
        raise UnknownValue("report", name, FIELD_REPORTS)
    return FIELD_REPORTS[name]


MAX_CPU_DEVICES = 2
# axes of which a user may keep some values
SELECTABLE_AXES = (
    *("framework", "batch", "strategy", "precision"),
    *("layout", "input", "augment", "decode"),
)


def default_devices(machine: Machine, device: str | None = None) -> str:
    """Return the devices of a report as a list: 1, 2, 4, … up to the machine; at most 2 CPU devices."""
    kind = device or ("cuda" if machine.gpus else "cpu")
    most = machine.device_count(kind) if kind == "cuda" else min(MAX_CPU_DEVICES, machine.cores)
    counts = powers_of_two(max(1, most))
    return ",".join(str(n) if kind == "cuda" else f"cpu:{n}" for n in counts)


def select_axes(
    parts: Sequence[ReportGrid], devices: str, common: Plan, axis_values: Mapping[str, str]
) -> list[GridAxes]:
    """Return the axes of all grids on ``devices``, without the grids that have nothing left.

    The lengths of ``common`` replace those of the report; ``axis_values`` maps an axis to the list
    of its values to keep. Raises UsageError if nothing is left, if no grid has a given axis, or no
    grid has a length of the given kind.
    """
    for name in ("steps", "epochs"):
        given = getattr(common, name)
        if given is not None and all(getattr(part, name) is None for part in parts):
            raise UsageError(
                f"--{name} {given}: no grid of this report has a length in {name}; next: remove it"
            )
    for name in axis_values:
        if not any(name in part.axes for part in parts):
            raise UsageError(f"this report has no axis {name!r}; next: remove --{name}")
    found = [axes for part in parts for axes in _axes(part, devices, common, axis_values)]
    if not found:
        kept = ", ".join(f"--{name} {text}" for name, text in axis_values.items())
        raise UsageError(
            f"nothing of this report is left with {kept or f'--devices {devices}'}; "
            "next: nfold bench --report NAME --dry-run shows its values"
        )
    return found


def _axes(
    part: ReportGrid, devices: str, common: Plan, axis_values: Mapping[str, str]
) -> list[GridAxes]:
    lists = {name: _selected(name, text, axis_values) for name, text in part.axes.items()}
    if not all(lists.values()):
        return []
    whole = parse_axes(
        part.workload,
        {"devices": devices, **lists},
        common=common.edit(
            steps=part.steps and (common.steps or part.steps),
            epochs=part.epochs and (common.epochs or part.epochs),
            warmup_steps=part.warmup_steps,
        ),
        parameters=part.parameters,
        scaling=part.scaling,
    )
    most = part.max_devices or math.inf
    fitting = [c for c in whole.changes["devices"] if part.min_devices <= c["devices"] <= most]
    if not part.epochs_per_device:
        changes = {**whole.changes, "devices": tuple(fitting)}
        return [replace(whole, changes=changes)] if fitting else []
    return [
        replace(
            whole,
            changes={**whole.changes, "devices": (change,)},
            common=whole.common.edit(epochs=(whole.common.epochs or 1) * change["devices"]),
        )
        for change in fitting
    ]


def _selected(name: str, text: str, axis_values: Mapping[str, str]) -> str:
    if name not in axis_values:
        return text
    kept = parse_axes("digits", {name: axis_values[name]}, common=Plan()).changes[name]
    values = {str(change[name]) for change in kept}
    return ",".join(entry for entry in text.split(",") if entry in values)


def build_field_report(name: str, measurements: Sequence[Measurement]) -> FieldReport:
    """Build a field report from the measurements of the newest machine; raises UnknownValue."""
    spec = find_report(name)
    machine = measurements[-1].machine.id if measurements else None
    own = [m for m in measurements if m.machine.id == machine]
    return spec.build(compute_results(group_cells(own)))
