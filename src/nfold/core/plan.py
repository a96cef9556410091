"""How a workload is trained: one frozen value, resolved once on the machine, then hashed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from dataclasses import dataclass, fields
from typing import Any, Protocol

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
}
"""The values of every named axis. What a framework cannot do of them, it says with a reason."""

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
"""The smallest value of every numeric axis."""

WARMUP_STEPS = 10
MIN_TIMED_STEPS = 5
"""Timed steps; from fewer nobody can tell anything."""
LONG_STEP_S = 0.3
"""Of steps that take longer fewer are made: 57 of them, as in a first look, would take 17 s."""
PREFETCH_BATCHES = 4
"""Batches that each worker of nfold's own loaders makes ahead of the step."""
PREFETCH_WARMUP_FACTOR = 4
"""A warm-up of so many times what lies ready uses it up, unless a loader's workers are almost as
fast as the devices."""


@dataclass(frozen=True, kw_only=True)
class WorkloadDefaults:
    """What a workload suggests where a plan says nothing."""

    batch: int
    epochs: int | None
    """None where the workload has no epochs; its length is then in steps."""
    steps: int | None = None
    data_bytes: int | None = None
    """Of its training set as it lies on a device; None where it has none or nobody knows."""
    encoded: bool = False
    """Whether its images are files that have to be decoded for every step."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a workload is trained. None means automatic; ``resolve`` fills it in on a machine.

    ``batch`` is the global batch in samples per step, ``devices`` a count, ``cores_per_device``
    the cores of one CPU device, ``workers`` loader processes per rank. A rank computes its share
    of a batch in ``accumulate`` parts; gradients are sent as ``exchange``; ``batch_norm`` is over
    each device's own samples of a part or, synchronised, over those of all devices. ``kernels``
    says whether a compiled step takes kernels as they come or searches for the fastest. One call
    makes ``steps_per_execution`` steps. ``allocation`` says whether a framework takes memory of a
    GPU as it does by default or as it needs it. ``decode`` is where image files become pixels, None
    where there are none; ``cache`` may keep them decoded, ``bad_images`` leave out damaged ones.
    The length is either ``steps`` (timed steps after ``warmup_steps``) or ``epochs``.
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
            raise UsageError(
                f"steps {self.steps} and epochs {self.epochs}: give one of them as the length"
            )

    @property
    def id(self) -> str:
        """Ten hex digits. Fields at their default are left out, so that new fields keep old ids."""
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        kept = {f.name: said[f.name] for f in fields(self) if said[f.name] != f.default}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to resolve (``steps`` or ``epochs`` is None, not both).

        ``decode`` may be None: many workloads have nothing to decode.
        """
        open_fields = {f.name for f in fields(self) if getattr(self, f.name) is None}
        return open_fields - {"decode"} in ({"steps"}, {"epochs"})

    @property
    def has_placement(self) -> bool:
        """Whether it says what a script needs: where it runs and for how long.

        The rest a script decides by itself; what is given all the same is imposed on it.
        """
        needed = (self.device, self.devices, self.cores_per_device, self.strategy)
        lengths = [self.steps, self.epochs].count(None)
        return lengths == 1 and None not in (*needed, self.warmup_steps)

    def edit(self, **changes: Any) -> Plan:
        """The same plan with some fields changed; the other length is cleared when one is set."""
        unknown = [name for name in changes if name not in PLAN_FIELDS]
        if unknown:
            raise UnknownValue("plan field", unknown[0], PLAN_FIELDS)
        if changes.get("steps") is not None:
            changes.setdefault("epochs", None)
        if changes.get("epochs") is not None:
            changes.setdefault("steps", None)
        return dataclasses.replace(self, **changes)

    def diff(self, other: Plan) -> dict[str, tuple[Any, Any]]:
        """The fields in which two plans differ: name to (this plan's, the other's)."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in PLAN_FIELDS}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def resolve(self, machine: Machine, defaults: WorkloadDefaults) -> Plan:
        """The complete plan on ``machine``: every None replaced by the choice for it.

        Raises DevicesMissing where the machine has fewer devices than asked for.
        """
        device = self.device or ("cuda" if machine.gpus else "cpu")
        devices = self.devices or _devices(machine, device, self.strategy)
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
        """All fields as plain JSON values."""
        values: dict[str, Any] = serialize(self)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """The plan that ``to_dict`` or a TOML table wrote; unknown names are refused."""
        for name in values:
            if name not in PLAN_FIELDS:
                raise UnknownValue("plan field", name, PLAN_FIELDS)
        try:
            return deserialize(cls, values)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def to_toml(self) -> str:
        """The fields that are set, one ``name = value`` a line, as ``nfold.toml`` holds them."""
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        lines = [f"{k} = {json.dumps(v)}" for k, v in said.items() if v is not None]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """The plan that ``to_toml`` or a person wrote."""
        try:
            return cls.from_dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"the plan is not TOML: {error}") from None


PLAN_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(Plan))


def _devices(machine: Machine, device: str, strategy: str | None) -> int:
    several = device == "cuda" and strategy != "single"
    return max(1, len(machine.gpus)) if several else 1


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
        f"{devices} {device} devices{each} were asked for, {available} {unit} exist here; "
        f"next: {hint}"
    )


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4 and so on, up to ``limit``."""
    return [2**k for k in range(limit.bit_length()) if 2**k <= limit]


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
