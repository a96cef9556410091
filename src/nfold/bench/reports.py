"""The grids of the five field reports: data, written as a user would write the axes.

Nothing here knows what a value means: ``report_axes.py`` reads it with the functions that read a
user's command line, and refuses there what this version does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nfold.errors import UnknownValue


@dataclass(frozen=True, kw_only=True)
class Part:
    """One grid of a report: a workload, comma lists by axis, and a length.

    Fewer devices than ``least`` and more than ``most`` are left out of this grid. Under
    ``epochs_per_device`` N devices make N times the epochs: with a batch per device, as many
    steps as one device makes.
    """

    workload: str
    lists: Mapping[str, str] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    scaling: str = "strong"
    steps: int | None = None
    epochs: int | None = None
    warmup_steps: int | None = None
    least: int = 1
    most: int | None = None
    epochs_per_device: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """A field report as grids that run as one sweep; ``quick`` is for a machine of two cores."""

    name: str
    full: tuple[Part, ...]
    quick: tuple[Part, ...]
    repeats: int = 1

    def parts(self, *, quick: bool) -> tuple[Part, ...]:
        """The grids that are run."""
        return self.quick if quick else self.full


TORCH = {"framework": "torch"}
FEW_IMAGES = {"batch": "42"}
"""Of a convolution that other libraries on a CPU take seconds for."""

CIFAR_BATCHES = "128,256,512,1024,2048"
CIFAR_EPOCHS = 100
"""As many as the field report trained."""
TORCH_ON_CIFAR = {
    "framework": "torch",
    "batch": CIFAR_BATCHES,
    "strategy": "dp,ddp,nfold",
}
OTHERS_ON_CIFAR = {"framework": "tensorflow,jax", "batch": CIFAR_BATCHES}

BOTH = "channels_first,channels_last"

EVERY_FRAMEWORK = {"framework": "torch,tensorflow,jax", "batch": "100"}
OTHER_INPUTS = {"framework": "tensorflow", "batch": "100", "input": "generator,tf.data"}
TUTORIAL = "mnist:samples=8000"
"""8,000 images are in either copy of MNIST and are 80 steps of 100: 125 epochs are 10,000 steps."""
SHORT_TUTORIAL = "mnist:samples=6000"

REPORTS: dict[str, Report] = {
    report.name: report
    for report in (
        Report(
            name="conv2d-devices",
            full=(
                Part(workload="conv2d", lists=TORCH, steps=30),
                Part(
                    workload="conv2d",
                    lists=TORCH,
                    parameters=("filter=3,10", "channels=1,10"),
                    steps=30,
                ),
                Part(workload="conv2d:copy_only=1", lists=TORCH, steps=30),
                Part(workload="conv2d", lists={"framework": "tensorflow,jax"}, steps=30),
            ),
            quick=(
                Part(workload="conv2d", steps=10, warmup_steps=2),
                Part(workload="conv2d:filter=10", lists=FEW_IMAGES, steps=3, warmup_steps=1),
                Part(workload="conv2d:channels=10", lists=FEW_IMAGES, steps=3, warmup_steps=1),
                Part(workload="conv2d:copy_only=1", steps=10, warmup_steps=2),
            ),
        ),
        Report(
            name="mirrored-mnist",
            full=(
                Part(
                    workload=TUTORIAL,
                    lists=EVERY_FRAMEWORK,
                    epochs=125,
                ),
                Part(
                    workload=TUTORIAL,
                    lists=EVERY_FRAMEWORK,
                    scaling="weak",
                    epochs=125,
                    epochs_per_device=True,
                    least=2,
                ),
                Part(
                    workload=TUTORIAL,
                    lists=OTHER_INPUTS,
                    epochs=125,
                ),
            ),
            quick=(
                Part(
                    workload=SHORT_TUTORIAL,
                    lists=EVERY_FRAMEWORK,
                    epochs=3,
                ),
                Part(
                    workload=SHORT_TUTORIAL,
                    lists=EVERY_FRAMEWORK,
                    scaling="weak",
                    epochs=3,
                    least=2,
                ),
                Part(
                    workload=SHORT_TUTORIAL,
                    lists=OTHER_INPUTS,
                    epochs=3,
                    least=2,
                ),
            ),
        ),
        Report(
            name="inception-input",
            full=(
                Part(
                    workload="inception_v3",
                    lists={"batch": "32", "augment": "cpu,device", "decode": "cpu,device"},
                    steps=100,
                ),
                Part(
                    workload="inception_v3",
                    lists={
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
                Part(
                    workload="inception_v3:samples=32,size=107",
                    lists={"batch": "8", "augment": "cpu,device", "decode": "cpu"},
                    steps=6,
                    warmup_steps=1,
                ),
            ),
        ),
        Report(
            name="cifar-scaling",
            full=(
                Part(
                    workload="cnn10",
                    lists=TORCH_ON_CIFAR,
                    epochs=CIFAR_EPOCHS,
                ),
                Part(
                    workload="cnn10",
                    lists=OTHERS_ON_CIFAR,
                    epochs=CIFAR_EPOCHS,
                ),
                Part(
                    workload="wide_resnet:depth=28,width=10",
                    lists=TORCH_ON_CIFAR,
                    epochs=CIFAR_EPOCHS,
                ),
                Part(
                    workload="wide_resnet:depth=28,width=10",
                    lists=OTHERS_ON_CIFAR,
                    epochs=CIFAR_EPOCHS,
                ),
            ),
            quick=(
                Part(
                    workload="cnn10:samples=256,test_samples=256",
                    lists={"framework": "torch", "batch": "32,128", "strategy": "dp,ddp,nfold"},
                    epochs=2,
                    warmup_steps=1,
                ),
                Part(
                    workload="cnn10:samples=256,test_samples=256",
                    lists={"framework": "tensorflow,jax", "batch": "128"},
                    epochs=2,
                    warmup_steps=1,
                ),
                Part(
                    workload="wide_resnet:depth=10,width=1,samples=512,test_samples=512",
                    lists={"framework": "torch", "batch": "128", "strategy": "nfold"},
                    epochs=2,
                    warmup_steps=1,
                ),
            ),
        ),
        Report(
            name="layout",
            full=(
                Part(
                    workload="cnn10",
                    lists={
                        "framework": "torch,tensorflow,jax",
                        "batch": "512",
                        "precision": "fp32,tf32,bf16",
                        "layout": BOTH,
                    },
                    steps=200,
                ),
                Part(
                    workload="wide_resnet:depth=28,width=10",
                    lists={
                        "framework": "torch,tensorflow,jax",
                        "batch": "128",
                        "precision": "fp32,tf32,bf16",
                        "layout": BOTH,
                    },
                    steps=100,
                ),
            ),
            quick=(
                Part(
                    workload="wide_resnet:depth=10,width=1",
                    lists={"framework": "torch", "batch": "64", "layout": BOTH},
                    steps=10,
                    warmup_steps=2,
                ),
                Part(
                    workload="wide_resnet:depth=10,width=1",
                    lists={"framework": "tensorflow,jax", "batch": "64", "layout": BOTH},
                    steps=10,
                    warmup_steps=2,
                    most=1,
                ),
                Part(
                    workload="cnn10",
                    lists={"framework": "torch", "batch": "16", "layout": BOTH},
                    steps=6,
                    warmup_steps=1,
                    most=1,
                ),
            ),
            repeats=3,
        ),
    )
}


def report(name: str) -> Report:
    """The report of that name; UnknownValue lists the names, closest first."""
    if name not in REPORTS:
        raise UnknownValue("report", name, REPORTS)
    return REPORTS[name]
