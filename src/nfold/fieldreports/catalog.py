"""The five field reports: their grids, as axes that a user could type, and their builders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from nfold.fieldreports.sheets import FieldReport


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class FieldReportSpec:
    """A field report as grids that run as one sweep; ``quick`` is for a machine of two cores."""

    name: str
    full: tuple[ReportGrid, ...]
    quick: tuple[ReportGrid, ...]
    repeats: int = 1

    def grids(self, *, quick: bool) -> tuple[ReportGrid, ...]:
        return self.quick if quick else self.full


TORCH_ONLY = {"framework": "torch"}
FEW_IMAGES = {"batch": "42"}  # other libraries take seconds for a convolution on a CPU

CIFAR_BATCHES = "128,256,512,1024,2048"
CIFAR_GRID_EPOCHS = 100  # as in the published report
TORCH_ON_CIFAR = {"framework": "torch", "batch": CIFAR_BATCHES, "strategy": "dp,ddp,nfold"}
OTHER_FRAMEWORKS_ON_CIFAR = {"framework": "tensorflow,jax", "batch": CIFAR_BATCHES}

BOTH_LAYOUTS = "channels_first,channels_last"

ALL_FRAMEWORKS = {"framework": "torch,tensorflow,jax", "batch": "100"}
OTHER_INPUTS = {"framework": "tensorflow", "batch": "100", "input": "generator,tf.data"}
TUTORIAL_WORKLOAD = "mnist:samples=8000"  # 80 steps of 100 images: 125 epochs are 10,000 steps
SHORT_TUTORIAL_WORKLOAD = "mnist:samples=6000"

FIELD_REPORTS: dict[str, FieldReportSpec] = {
    report.name: report
    for report in (
        FieldReportSpec(
            name="conv2d-devices",
            full=(
                ReportGrid(workload="conv2d", axes=TORCH_ONLY, steps=30),
                ReportGrid(
                    workload="conv2d",
                    axes=TORCH_ONLY,
                    parameters=("filter=3,10", "channels=1,10"),
                    steps=30,
                ),
                ReportGrid(workload="conv2d:copy_only=1", axes=TORCH_ONLY, steps=30),
                ReportGrid(workload="conv2d", axes={"framework": "tensorflow,jax"}, steps=30),
            ),
            quick=(
                ReportGrid(workload="conv2d", steps=10, warmup_steps=2),
                ReportGrid(workload="conv2d:filter=10", axes=FEW_IMAGES, steps=3, warmup_steps=1),
                ReportGrid(workload="conv2d:channels=10", axes=FEW_IMAGES, steps=3, warmup_steps=1),
                ReportGrid(workload="conv2d:copy_only=1", steps=10, warmup_steps=2),
            ),
        ),
        FieldReportSpec(
            name="mirrored-mnist",
            full=(
                ReportGrid(workload=TUTORIAL_WORKLOAD, axes=ALL_FRAMEWORKS, epochs=125),
                ReportGrid(
                    workload=TUTORIAL_WORKLOAD,
                    axes=ALL_FRAMEWORKS,
                    scaling="weak",
                    epochs=125,
                    epochs_per_device=True,
                    min_devices=2,
                ),
                ReportGrid(workload=TUTORIAL_WORKLOAD, axes=OTHER_INPUTS, epochs=125),
            ),
            quick=(
                ReportGrid(workload=SHORT_TUTORIAL_WORKLOAD, axes=ALL_FRAMEWORKS, epochs=3),
                ReportGrid(
                    workload=SHORT_TUTORIAL_WORKLOAD,
                    axes=ALL_FRAMEWORKS,
                    scaling="weak",
                    epochs=3,
                    min_devices=2,
                ),
                ReportGrid(
                    workload=SHORT_TUTORIAL_WORKLOAD, axes=OTHER_INPUTS, epochs=3, min_devices=2
                ),
            ),
        ),
        FieldReportSpec(
            name="inception-input",
            full=(
                ReportGrid(
                    workload="inception_v3",
                    axes={"batch": "32", "augment": "cpu,device", "decode": "cpu,device"},
                    steps=100,
                ),
                ReportGrid(
                    workload="inception_v3",
                    axes={
                        "batch": "128",
                        "precision": "bf16",
                        "augment": "cpu,device",
                        "decode": "cpu,device",
                    },
                    scaling="weak",
                    steps=100,
                ),
            ),
            quick=(
                ReportGrid(
                    workload="inception_v3:samples=32,size=107",
                    axes={"batch": "8", "augment": "cpu,device", "decode": "cpu"},
                    steps=6,
                    warmup_steps=1,
                ),
            ),
        ),
        FieldReportSpec(
            name="cifar-scaling",
            full=(
                ReportGrid(workload="cnn10", axes=TORCH_ON_CIFAR, epochs=CIFAR_GRID_EPOCHS),
                ReportGrid(
                    workload="cnn10", axes=OTHER_FRAMEWORKS_ON_CIFAR, epochs=CIFAR_GRID_EPOCHS
                ),
                ReportGrid(
                    workload="wide_resnet:depth=28,width=10",
                    axes=TORCH_ON_CIFAR,
                    epochs=CIFAR_GRID_EPOCHS,
                ),
                ReportGrid(
                    workload="wide_resnet:depth=28,width=10",
                    axes=OTHER_FRAMEWORKS_ON_CIFAR,
                    epochs=CIFAR_GRID_EPOCHS,
                ),
            ),
            quick=(
                ReportGrid(
                    workload="cnn10:samples=256,test_samples=256",
                    axes={"framework": "torch", "batch": "32,128", "strategy": "dp,ddp,nfold"},
                    epochs=2,
                    warmup_steps=1,
                ),
                ReportGrid(
                    workload="cnn10:samples=256,test_samples=256",
                    axes={"framework": "tensorflow,jax", "batch": "128"},
                    epochs=2,
                    warmup_steps=1,
                ),
                ReportGrid(
                    workload="wide_resnet:depth=10,width=1,samples=512,test_samples=512",
                    axes={"framework": "torch", "batch": "128", "strategy": "nfold"},
                    epochs=2,
                    warmup_steps=1,
                ),
            ),
        ),
        FieldReportSpec(
            name="layout",
            full=(
                ReportGrid(
                    workload="cnn10",
                    axes={
                        "framework": "torch,tensorflow,jax",
                        "batch": "512",
                        "precision": "fp32,tf32,bf16",
                        "layout": BOTH_LAYOUTS,
                    },
                    steps=200,
                ),
                ReportGrid(
                    workload="wide_resnet:depth=28,width=10",
                    axes={
                        "framework": "torch,tensorflow,jax",
                        "batch": "128",
                        "precision": "fp32,tf32,bf16",
                        "layout": BOTH_LAYOUTS,
                    },
                    steps=100,
                ),
            ),
            quick=(
                ReportGrid(
                    workload="wide_resnet:depth=10,width=1",
                    axes={"framework": "torch", "batch": "64", "layout": BOTH_LAYOUTS},
                    steps=10,
                    warmup_steps=2,
                ),
                ReportGrid(
                    workload="wide_resnet:depth=10,width=1",
                    axes={"framework": "tensorflow,jax", "batch": "64", "layout": BOTH_LAYOUTS},
                    steps=10,
                    warmup_steps=2,
                    max_devices=1,
                ),
                ReportGrid(
                    workload="cnn10",
                    axes={"framework": "torch", "batch": "16", "layout": BOTH_LAYOUTS},
                    steps=6,
                    warmup_steps=1,
                    max_devices=1,
                ),
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
    "framework",
    "batch",
    "strategy",
    "precision",
    "layout",
    "input",
    "augment",
    "decode",
)


def default_devices(machine: Machine, device: str | None = None) -> str:
    """Return the devices of a report as a list: 1, 2, 4, … up to the machine; at most 2 CPU devices."""
    kind = device or ("cuda" if machine.gpus else "cpu")
    most = machine.device_count(kind) if kind == "cuda" else min(MAX_CPU_DEVICES, machine.cores)
    counts = powers_of_two(max(1, most))
    return ",".join(str(n) if kind == "cuda" else f"cpu:{n}" for n in counts)


@dataclass(frozen=True, kw_only=True)
class ReportSelection:
    """The part of a report to measure: devices as a list, and lengths that replace its own.

    ``axis_values`` maps an axis to the list of its values to keep.
    """

    devices: str
    device: str | None = None
    steps: int | None = None
    epochs: int | None = None
    axis_values: Mapping[str, str] = field(default_factory=dict)


def select_axes(parts: Sequence[ReportGrid], chosen: ReportSelection) -> list[GridAxes]:
    """Return the axes of all grids, without the grids that have nothing left.

    Raises UsageError if nothing is left, if no grid has a given axis, or no grid has a length of the
    given kind.
    """
    _check_lengths(parts, chosen)
    for name in chosen.axis_values:
        if not any(name in part.axes for part in parts):
            raise UsageError(f"this report has no axis {name!r}; next: remove --{name}")
    found = [axes for part in parts for axes in _axes(part, chosen)]
    if not found:
        given = ", ".join(f"--{name} {text}" for name, text in chosen.axis_values.items())
        raise UsageError(
            f"nothing of this report is left with {given or f'--devices {chosen.devices}'}; "
            "next: nfold bench --report NAME --dry-run shows its values"
        )
    return found


def _check_lengths(parts: Sequence[ReportGrid], chosen: ReportSelection) -> None:
    for name in ("steps", "epochs"):
        given = getattr(chosen, name)
        if given is not None and all(getattr(part, name) is None for part in parts):
            raise UsageError(
                f"--{name} {given}: no grid of this report has a length in {name}; next: remove it"
            )


def _axes(part: ReportGrid, chosen: ReportSelection) -> list[GridAxes]:
    lists = {name: _selected_values(name, text, chosen) for name, text in part.axes.items()}
    if not all(lists.values()):
        return []
    whole = parse_axes(
        part.workload,
        {"devices": chosen.devices, **lists},
        common=Plan(
            device=chosen.device,
            steps=part.steps and (chosen.steps or part.steps),
            epochs=part.epochs and (chosen.epochs or part.epochs),
            warmup_steps=part.warmup_steps,
        ),
        parameters=part.parameters,
        scaling=part.scaling,
    )
    fitting = tuple(c for c in whole.changes["devices"] if _fits(part, c["devices"]))
    if not fitting:
        return []
    kept = replace(whole, changes={**whole.changes, "devices": fitting})
    return _per_devices(kept) if part.epochs_per_device else [kept]


def _fits(part: ReportGrid, devices: int) -> bool:
    return devices >= part.min_devices and (part.max_devices is None or devices <= part.max_devices)


def _selected_values(name: str, text: str, chosen: ReportSelection) -> str:
    if name not in chosen.axis_values:
        return text
    kept = parse_axes("digits", {name: chosen.axis_values[name]}, common=Plan()).changes[name]
    values = {str(change[name]) for change in kept}
    return ",".join(entry for entry in text.split(",") if entry in values)


def _per_devices(whole: GridAxes) -> list[GridAxes]:
    epochs = whole.common.epochs or 1
    return [
        replace(
            whole,
            changes={**whole.changes, "devices": (change,)},
            common=whole.common.edit(epochs=epochs * change["devices"]),
        )
        for change in whole.changes["devices"]
    ]


REPORT_BUILDERS: dict[str, Callable[[Sequence[CellResult]], FieldReport]] = {
    "conv2d-devices": conv2d_devices.conv2d_report,
    "mirrored-mnist": mirrored_mnist.mnist_report,
    "inception-input": inception_input.inception_report,
    "cifar-scaling": cifar_scaling.cifar_report,
    "layout": layout_comparison.layout_report,
}


def build_field_report(name: str, measurements: Sequence[Measurement]) -> FieldReport:
    """Build a field report from the measurements of the newest machine; raises UnknownValue."""
    if name not in REPORT_BUILDERS:
        raise UnknownValue("report", name, REPORT_BUILDERS)
    machine = measurements[-1].machine.id if measurements else None
    own = [m for m in measurements if m.machine.id == machine]
    return REPORT_BUILDERS[name](compute_results(group_cells(own)))
