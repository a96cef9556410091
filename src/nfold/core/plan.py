"""The plan: how a workload is trained, as a value that is resolved on a machine and hashed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from nfold.core.errors import DevicesMissing, UnknownValue, UsageError
from nfold.core.machine import Machine
from nfold.core.serialization import deserialize, serialize

ALLOWED_VALUES: dict[str, tuple[str, ...]] = {
    "framework": ("torch", "tensorflow", "jax", "keras-torch", "simulated"),
    "device": ("cuda", "cpu"),
    "strategy": ("single", "ddp", "nfold", "dp", "mirrored", "data_parallel"),
    "precision": ("fp32", "tf32", "bf16", "fp16"),
    "layout": ("channels_first", "channels_last"),
    "input": ("loader", "resident", "generator", "tf.data"),
    "decode": ("cpu", "device"),
    "cache": ("off", "decoded"),
    "bad_images": ("refuse", "skip"),
    "augment": ("cpu", "device"),
    "step": ("eager", "graph", "compiled", "captured", "compiled+captured"),
    "kernels": ("default", "tuned"),
    "exchange": ("fp32", "bf16"),
    "batch_norm": ("device", "synchronised"),
    "allocation": ("default", "growth"),
    "memory": ("fixed", "fit"),
    "optimizer_state": ("whole", "sharded"),
}  # a framework refuses those that it does not support, with a reason

MINIMUM_VALUES: dict[str, int] = {
    "devices": 1,
    "cores_per_device": 1,
    "batch": 1,
    "accumulate": 1,
    "steps_per_execution": 1,
    "workers": 0,
    "seed": 0,
    "steps": 1,
    "epochs": 1,
    "warmup_steps": 0,
}

TUNE_TABLE = "tune"  # of nfold.toml, which is no part of the plan
KEPT_PLAN_VARIABLE = "NFOLD_KEPT_PLAN"  # fields of nfold.Run as JSON, before those of the script
SAFE_PLAN = "safe"  # in place of a script's plan: no field is chosen by a search
WARMUP_STEPS = 10
MIN_TIMED_STEPS = 5  # fewer are not a measurement
LONG_STEP_S = 0.3  # if steps take longer, fewer are run: 57 as in a probe run would take 17 s
PREFETCH_BATCHES = 4  # per worker of nfold's own loaders
PREFETCH_WARMUP_FACTOR = 4
"""A warm-up of this many times the prefetched batches uses them up, unless workers are almost as
fast as devices."""
DEFAULT_PREFETCH_FACTOR = 2  # of torch.utils.data.DataLoader


def prefetched_batches(workers: int, prefetch_factor: int | None = None) -> int:
    """Return the batches to skip until those that workers prefetched before the first step are used."""
    return PREFETCH_WARMUP_FACTOR * workers * (prefetch_factor or DEFAULT_PREFETCH_FACTOR)


@dataclass(frozen=True, kw_only=True)
class WorkloadDefaults:
    """Values of a workload for fields that a plan leaves open.

    Attributes:
        epochs: None for a workload without epochs, whose length is in steps.
        data_bytes: size of the training set on a device, None if there is none or it is unknown.
        encoded: images are files that are decoded for every step.
    """

    batch: int
    epochs: int | None
    steps: int | None = None
    data_bytes: int | None = None
    encoded: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a workload is trained. None means automatic; ``resolve`` chooses values on a machine.

    Attributes:
        devices: number of devices.
        cores_per_device: cores of one CPU device.
        batch: global batch, in samples per step.
        workers: loader processes per rank.
        decode: where image files are decoded; None if there are none.
        cache: ``decoded`` keeps decoded images.
        bad_images: ``skip`` ignores damaged images.
        kernels: ``tuned`` searches for the fastest kernels of a compiled step.
        accumulate: parts in which a rank computes its share of a batch.
        exchange: type in which gradients are sent.
        batch_norm: over the samples of each device, or ``synchronised`` over all devices.
        steps_per_execution: steps per call.
        allocation: ``growth`` allocates memory of a GPU as needed.
        memory: ``fit`` chooses the micro-batches of a script; ``fixed`` takes ``accumulate``.
        optimizer_state: ``sharded`` keeps each parameter's optimizer state on one rank only.
        steps, epochs: length, one of them; ``steps`` are timed steps after ``warmup_steps``.
    """

    framework: str = "torch"
    device: str | None = None
    devices: int | None = None
    cores_per_device: int | None = None
    strategy: str | None = None
    batch: int | None = None
    precision: str | None = None
    layout: str | None = None
    input: str | None = None
    workers: int | None = None
    decode: str | None = None
    cache: str = "off"
    bad_images: str = "refuse"
    augment: str | None = None
    step: str | None = None
    kernels: str = "default"
    accumulate: int = 1
    exchange: str = "fp32"
    batch_norm: str = "device"
    steps_per_execution: int = 1
    allocation: str = "default"
    memory: str = "fixed"
    optimizer_state: str = "whole"
    seed: int = 0
    steps: int | None = None
    epochs: int | None = None
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED_VALUES.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise UnknownValue(name, value, allowed)
        for name, minimum in MINIMUM_VALUES.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < minimum):
                raise UsageError(f"{name} {value!r}: allowed are whole numbers from {minimum}")
        if self.steps is not None and self.epochs is not None:
            raise UsageError(f"steps {self.steps} and epochs {self.epochs}: allowed is one of them")

    @property
    def id(self) -> str:
        """Ten hex digits of all fields that are not at their default."""
        changed = {name: value for name, (value, _) in self.diff(Plan()).items()}
        return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def is_complete(self) -> bool:
        """Return whether all fields but ``decode`` and one of the lengths are resolved."""
        open_fields = {f.name for f in fields(self) if getattr(self, f.name) is None}
        return open_fields - {"decode"} in ({"steps"}, {"epochs"})

    @property
    def has_placement(self) -> bool:
        """Return whether the fields that a script needs are resolved: where and how long it runs."""
        needed = (self.device, self.devices, self.cores_per_device, self.strategy)
        lengths = [self.steps, self.epochs].count(None)
        return lengths == 1 and None not in (*needed, self.warmup_steps)

    def edit(self, **changes: Any) -> Plan:
        """Return a plan with some fields changed. Setting one length clears the other."""
        _check_fields(changes)
        if changes.get("steps") is not None:
            changes.setdefault("epochs", None)
        if changes.get("epochs") is not None:
            changes.setdefault("steps", None)
        return dataclasses.replace(self, **changes)

    def diff(self, other: Plan) -> dict[str, tuple[Any, Any]]:
        """Return the fields that differ: name to (value of this plan, of the other)."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in PLAN_FIELDS}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def resolve(self, machine: Machine, defaults: WorkloadDefaults) -> Plan:
        """Return the complete plan on ``machine``, with a choice for every None.

        Raises DevicesMissing if the machine has fewer devices than requested.
        """
        device = self.device or ("cuda" if machine.gpus else "cpu")
        all_gpus = device == "cuda" and self.strategy != "single"
        devices = self.devices or max(1, len(machine.gpus) if all_gpus else 1)
        if self.framework != "simulated":
            _check_devices(machine, device, devices, self.cores_per_device)
        cores = self.cores_per_device or max(1, machine.cores // devices)
        precision = self.precision or "fp32"
        input_ = self.input or choose_input(self, machine, device, defaults.data_bytes)
        step = self.step or choose_step(self, device, input_)
        timed = self.epochs is None and (self.steps is not None or defaults.epochs is None)
        return dataclasses.replace(
            self,
            device=device,
            devices=devices,
            cores_per_device=cores,
            strategy=choose_strategy(self, devices, step),
            batch=self.batch or defaults.batch,
            precision=precision,
            layout=self.layout or choose_layout(self, device, precision),
            input=input_,
            workers=choose_workers(self, device, cores, input_, encoded=defaults.encoded),
            decode=self.decode or ("cpu" if defaults.encoded else None),
            augment=self.augment or choose_augment(self, input_, device, encoded=defaults.encoded),
            step=step,
            steps=(self.steps or defaults.steps) if timed else None,
            epochs=None if timed else self.epochs or defaults.epochs,
            warmup_steps=WARMUP_STEPS if self.warmup_steps is None else self.warmup_steps,
        )

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Return the plan of JSON or TOML values. Raises UnknownValue for an unknown name."""
        _check_fields(values)
        try:
            return deserialize(cls, values)
        except ValueError as error:
            raise UsageError(str(error)) from None

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """Return the plan in the text of ``nfold.toml``; ignores the tables of ``nfold tune``.

        Raises UsageError for invalid TOML.
        """
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"the plan is not TOML: {error}") from None
        if isinstance(values.get(TUNE_TABLE), dict):
            del values[TUNE_TABLE]
        return cls.from_dict(values)


PLAN_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(Plan))


def _check_fields(names: Iterable[str]) -> None:
    for name in names:
        if name not in PLAN_FIELDS:
            raise UnknownValue("plan field", name, PLAN_FIELDS)


def _check_devices(machine: Machine, device: str, devices: int, cores: int | None) -> None:
    if device == "cuda" and not machine.gpus:
        raise DevicesMissing("0 cuda devices here; next: --device cpu runs on CPU devices")
    share = (cores or 1) if device == "cpu" else 1
    available = machine.device_count(device)
    if devices * share <= available:
        return
    unit = "cores (a CPU device is a share of them)" if device == "cpu" else "cuda devices"
    each = f" of {share} cores each" if share > 1 else ""
    possible = ",".join(map(str, powers_of_two(available // share)))
    hint = f"--devices {possible}" if possible else f"at most {available} cores per device"
    raise DevicesMissing(
        f"{devices} {device} devices{each} were requested, {available} {unit} exist here; "
        f"next: {hint}"
    )


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4 and so on, up to ``limit``."""
    return [2**k for k in range(limit.bit_length()) if 2**k <= limit]


MAX_RESIDENT_FRACTION = 0.25  # of the memory of a GPU, for a data set that is resident by default
KERAS_FRAMEWORKS = ("tensorflow", "jax", "keras-torch")
FRAMEWORK_STRATEGY = {"tensorflow": "mirrored", "jax": "data_parallel"}  # on several devices
FRAMEWORK_STEP = {"tensorflow": "graph", "jax": "compiled"}


def choose_strategy(plan: Plan, devices: int, step: str) -> str:
    """Choose ``single`` on one device, else the requested strategy or the default.

    The default is ``ddp`` for eager steps and nfold's own exchange for all others, which
    DistributedDataParallel does not support here.
    """
    if devices == 1:
        return "single"
    own = FRAMEWORK_STRATEGY.get(plan.framework)
    if plan.strategy == "single":
        allowed = own or "ddp, nfold, dp"
        raise UsageError(f"strategy 'single' with {devices} devices: allowed are {allowed}")
    return plan.strategy or own or ("ddp" if step == "eager" else "nfold")


def choose_layout(plan: Plan, device: str, precision: str) -> str:
    """Choose channels_last for cuDNN's tensor-core convolutions and for Keras, its own default."""
    tensor_cores = device == "cuda" and precision != "fp32"
    last = tensor_cores or plan.framework in KERAS_FRAMEWORKS
    return "channels_last" if last else "channels_first"


def choose_input(plan: Plan, machine: Machine, device: str, data_bytes: int | None) -> str:
    """Choose resident data on GPUs if they fit, unless the plan uses the host for input."""
    simulated = plan.framework == "simulated"
    on_host = simulated or device != "cuda" or plan.augment == "cpu"
    if on_host or plan.workers or data_bytes is None:
        return "loader"
    smallest = min(gpu.memory_bytes or 0 for gpu in machine.gpus)
    return "resident" if data_bytes <= MAX_RESIDENT_FRACTION * smallest else "loader"


def choose_step(plan: Plan, device: str, input_: str) -> str:
    """Choose a captured step over resident data on GPUs, which is never slower than eager.

    A compiled step is faster for most models but compilation takes time: it must be requested.
    """
    if plan.framework in FRAMEWORK_STEP:
        return FRAMEWORK_STEP[plan.framework]
    graph = device == "cuda" and input_ == "resident" and plan.framework == "torch"
    eager = plan.strategy in ("ddp", "dp") or plan.precision == "fp16"
    return "captured" if graph and not eager else "eager"


def choose_augment(plan: Plan, input_: str, device: str, *, encoded: bool) -> str:
    """Choose the device for resident images, and on GPUs if workers are busy with decoding.

    See docs/decisions/input-pipeline.md.
    """
    busy = encoded and device == "cuda" and plan.framework not in FRAMEWORK_STEP
    return "device" if input_ == "resident" or busy else "cpu"


def choose_workers(plan: Plan, device: str, cores: int, input_: str, *, encoded: bool) -> int:
    """Choose the loader processes per rank: half of the cores of a GPU's share, at most 8.

    One process per core starves the ranks: with 64 cores and 4 GPUs, a step took 16.2 ms with 14
    workers per GPU and 13.3 ms with 7. CPU devices compute with their cores, resident data needs
    no workers, and Keras makes input in a thread, which needs workers for image files only.
    Decoding is slower than training by an order of magnitude: it gets all cores but one.
    """
    if plan.workers is not None:
        return plan.workers
    by_a_thread = plan.framework in KERAS_FRAMEWORKS and not encoded
    if device == "cpu" or input_ == "resident" or by_a_thread:
        return 0
    return max(1, cores - 1) if encoded else max(1, min(8, cores // 2))


def parse_device_count(text: str) -> tuple[str | None, int]:
    """Parse ``2``, ``cpu:2``, ``gpu:2`` or ``cuda:2`` into a device type and a count.

    The type is None if it is not given. Raises UsageError for any other text.
    """
    kind, colon, count = text.rpartition(":")
    known = not colon or kind in DEVICE_TYPES
    if not known or not (count.isascii() and count.isdigit()) or int(count) < 1:
        raise UsageError(
            f"--devices {text}: allowed are a count from 1, cpu:N, gpu:N and cuda:N; "
            "next: --devices 2"
        )
    return DEVICE_TYPES.get(kind), int(count)


DEVICE_TYPES = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda"}
