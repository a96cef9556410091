"""What a plan does where nobody says it: the automatic choice of every axis that has one."""

from __future__ import annotations

from typing import Protocol

from nfold.errors import UsageError
from nfold.machine import Machine

MAX_RESIDENT_FRACTION = 0.25
"""The part of a GPU's memory that a data set may take unasked; a model has to fit beside it."""

KERAS_FRAMEWORKS = ("tensorflow", "jax", "keras-torch")
FRAMEWORK_STRATEGY = {"tensorflow": "mirrored", "jax": "data_parallel"}
"""What a framework other than PyTorch does over several devices."""
FRAMEWORK_STEP = {"tensorflow": "graph", "jax": "compiled"}
"""How it runs a step: as a function of its graph, or compiled by XLA as a whole."""


class PartialPlan(Protocol):
    """What choices depend on of what a plan says itself."""

    @property
    def framework(self) -> str:
        """Always said."""

    @property
    def strategy(self) -> str | None:
        """None: nothing said, here and below."""

    @property
    def precision(self) -> str | None:
        """Of the arithmetic."""

    @property
    def augment(self) -> str | None:
        """Where images are augmented."""

    @property
    def workers(self) -> int | None:
        """Loader processes per rank."""


def choose_strategy(plan: PartialPlan, devices: int, step: str) -> str:
    """One device has nothing to exchange: whatever was asked for, it runs ``single``.

    DistributedDataParallel runs eager steps only here; our own exchange runs in all of them.
    """
    if devices == 1:
        return "single"
    own = FRAMEWORK_STRATEGY.get(plan.framework)
    if plan.strategy == "single":
        allowed = own or "ddp, nfold, dp"
        raise UsageError(f"strategy 'single' with {devices} devices: allowed are {allowed}")
    return plan.strategy or own or ("ddp" if step == "eager" else "nfold")


def choose_layout(plan: PartialPlan, device: str, precision: str) -> str:
    """cuDNN's tensor-core convolutions want channels_last; fp32 ones and CPUs do not.

    It is Keras's own default, and TensorFlow's only one on CPUs.
    """
    if plan.framework in KERAS_FRAMEWORKS:
        return "channels_last"
    tensor_cores = device == "cuda" and precision != "fp32"
    return "channels_last" if tensor_cores else "channels_first"


def choose_input(plan: PartialPlan, machine: Machine, device: str, data_bytes: int | None) -> str:
    """On GPUs resident data where they fit, unless the host was asked to work on them."""
    simulated = plan.framework == "simulated"
    on_host = simulated or device != "cuda" or plan.augment == "cpu"
    if on_host or plan.workers or data_bytes is None:
        return "loader"
    smallest = min(gpu.memory_bytes or 0 for gpu in machine.gpus)
    return "resident" if data_bytes <= MAX_RESIDENT_FRACTION * smallest else "loader"


def choose_step(plan: PartialPlan, device: str, input_: str) -> str:
    """Over resident data a graph always runs as the eager step does, and is never slower.

    Compiling is faster still for most models, but takes its time first: it is asked for.
    """
    if plan.framework in FRAMEWORK_STEP:
        return FRAMEWORK_STEP[plan.framework]
    graph = device == "cuda" and input_ == "resident" and plan.framework == "torch"
    eager = plan.strategy in ("ddp", "dp") or plan.precision == "fp16"
    return "captured" if graph and not eager else "eager"


def choose_augment(plan: PartialPlan, input_: str, device: str, *, encoded: bool) -> str:
    """Where the images are: resident ones are on the device, and no worker touches them.

    Image files keep the workers busy with decoding: a GPU takes the rest
    (docs/decisions/input-pipeline.md),
    where its framework has the distortion.
    """
    busy = encoded and device == "cuda" and plan.framework not in FRAMEWORK_STEP
    return "device" if input_ == "resident" or busy else "cpu"


def choose_workers(
    plan: PartialPlan, device: str, cores: int, input_: str, *, encoded: bool
) -> int:
    """Loader processes per rank: none on CPU devices, whose cores compute; else half the share.

    Half, because one process per core starved every rank on a 64-core host with 4 GPUs: 14
    workers a GPU took 16.2 ms a step, 7 took 13.3. Resident data needs none, and
    Keras's input is made by a thread, which hands photographs on to as many others as this says.
    Decoding needs all cores but the rank's own: a core decodes hundreds a second, a GPU trains on
    thousands.
    """
    if plan.workers is not None:
        return plan.workers
    by_a_thread = plan.framework in KERAS_FRAMEWORKS and not encoded
    if device == "cpu" or input_ == "resident" or by_a_thread:
        return 0
    return max(1, cores - 1) if encoded else max(1, min(8, cores // 2))
