"""The experiment design: the trials that differ by one thing each, from one device to the real run.

The work of a device in a step is the same in every trial: one device alone, independent replicas
at the same time, data parallel without gradient exchange, with a barrier only, and the real run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Literal

from nfold.core.format import pluralize
from nfold.core.measurement import Caveat, HostGapLocation, Measurement
from nfold.core.plan import WARMUP_STEPS, Plan
from nfold.core.script_profile import ScriptProfile
from nfold.core.variant import Variant
from nfold.explain.metrics import GpuClockRate, Metrics, compute_metrics

WHOLE_EPOCHS = 3
# A prime: work that a script does after every 5th or 10th step does not fall on an epoch boundary.
SHORT_EPOCH_STEPS, SHORT_EPOCHS = 11, 3

NO_SCRIPT = ScriptProfile()
ONE_DEVICE = {"devices": 1, "strategy": "single"}
Input = Literal["real", "replayed", "resident"]
Scaling = Literal["strong", "weak"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A complete plan and the interventions on it. Equal trials are interchangeable."""

    plan: Plan
    variant: Variant = field(default_factory=Variant)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.plan, self.variant))

    def __hash__(self) -> int:
        return self._hash

    @property
    def ranks_synchronize(self) -> bool:
        """Return whether its ranks wait for each other in every step."""
        return self.variant.ranks_synchronize

    @property
    def keeps_collectives(self) -> bool:
        """Return whether collectives give its ranks the values of the script, but for rounding."""
        return self.variant.exchange == "real" and not self.variant.independent

    def metrics(self, measurement: Measurement) -> Metrics:
        """Return all metrics of a measurement of the trial; empty if nothing was timed."""
        return compute_metrics(measurement, ranks_synchronize=self.ranks_synchronize)

    def step_and_gap_ms(self, measurement: Measurement) -> float | None:
        """Return the milliseconds of a step with its share of the gaps between epochs.

        None if no step was timed.
        """
        metrics = self.metrics(measurement)
        return metrics["step"] + metrics.get("gap", 0.0) if "step" in metrics else None

    def edit(self, **changes: Any) -> Trial:
        """Return the trial with another plan."""
        return Trial(plan=self.plan.edit(**changes), variant=self.variant)

    def under(self, **interventions: Any) -> Trial:
        """Return the trial with further interventions."""
        return Trial(plan=self.plan, variant=self.variant.merge(Variant(**interventions)))

    def __str__(self) -> str:
        devices = self.plan.devices or 1
        text = f"{devices} device{'s' * (devices != 1)}"
        text += ", probe run" if self.plan.batch is None else f", batch {self.plan.batch}"
        text += ", whole epochs" if self.plan.epochs else ""
        return text if self.variant.preserves_training else f"{text}, {self.variant}"


HIDDEN_FIELDS = ("devices", "strategy", "steps", "epochs", "warmup_steps")
"""Fields of a plan that are named elsewhere or differ between all trials."""


def name_trial(trial: Trial, actual: Plan | None = None) -> str:
    """``2 devices, replayed input, no all-reduce``.

    ``actual`` is the plan of the real run: fields that differ from it are named too.
    """
    words = [pluralize(trial.plan.devices or 1, "device")]
    words += [intervention.label(value) for intervention, value in trial.variant.interventions()]
    if trial.plan.epochs:
        words.append("whole epochs")
    if actual is not None:
        own, usual = trial.plan.to_dict(), actual.to_dict()
        hidden = {*HIDDEN_FIELDS, *["batch"] * (trial.plan.devices != actual.devices)}
        changed = {name for name in own if own[name] != usual.get(name)} - hidden
        words += [f"{name} {own[name]}" for name in sorted(changed)]
    return ", ".join(words)


@functools.cache
def over_whole_epochs(trial: Trial) -> Trial:
    """Return the same trial, measured over whole epochs.

    The first epoch uses up the batches that workers prefetched before the first step.
    """
    warmup = min(WARMUP_STEPS, trial.plan.warmup_steps or WARMUP_STEPS)
    return trial.edit(epochs=WHOLE_EPOCHS, steps=None, warmup_steps=warmup)


@functools.cache
def over_short_epochs(trial: Trial) -> Trial:
    """Return the same trial of a script with epochs so short that some end while it is measured.

    The first short epoch is the warm-up: it uses up the batches that workers prefetched.
    """
    steps = SHORT_EPOCHS * SHORT_EPOCH_STEPS
    shorter = trial.edit(steps=steps, epochs=None, warmup_steps=SHORT_EPOCH_STEPS)
    return shorter.under(batches_per_epoch=SHORT_EPOCH_STEPS * trial.plan.accumulate)


@dataclass(frozen=True, kw_only=True)
class ExperimentDesign:
    """One complete ``plan`` on N devices, and the trials at both ends: one device and the real run.

    ``profile`` is what a probe run found in a script, None for a workload. From the same run come
    ``step_ms``, the step time without prefetched batches; ``start_s``, the seconds of the run
    without its steps; ``host_gaps_ms``, the usual host gap of each rank; ``gap_locations``, the code
    that each rank ran in it; and ``probe_caveats``, what is or may be wrong with the training.
    ``memory_bytes`` is the memory of one device, ``clock_rates`` the clocks of all devices while no
    rank waits. The steps of an operation are calls: it has no gradients and no loader.
    ``multi_process_failure`` is why a script fails with a process per device although it trains as
    one process. ``scaling_requested`` is whether the user chose the scaling.
    """

    plan: Plan
    scaling: Scaling = "strong"
    profile: ScriptProfile | None = field(default=None, compare=False)
    step_ms: float | None = field(default=None, compare=False)
    start_s: float | None = field(default=None, compare=False)
    host_gaps_ms: tuple[float, ...] = field(default=(), compare=False)
    gap_locations: tuple[tuple[HostGapLocation, ...], ...] = field(default=(), compare=False)
    memory_bytes: int | None = field(default=None, compare=False)
    probe_caveats: tuple[Caveat, ...] = field(default=(), compare=False)
    clock_rates: tuple[GpuClockRate, ...] = field(default=(), compare=False)
    is_operation: bool = field(default=False, compare=False)
    multi_process_failure: str = field(default="", compare=False)
    scaling_requested: bool = field(default=False, compare=False)

    @property
    def devices(self) -> int:
        return self.plan.devices or 1

    @property
    def batch_per_device(self) -> int:
        """Samples per step of the device that has the most."""
        return -(-(self.plan.batch or 1) // self.devices)

    @property
    def work_divisor(self) -> int:
        """Devices that share the step of one device: N with strong scaling, 1 with weak."""
        return self.devices if self.scaling == "strong" else 1

    @property
    def facts(self) -> ScriptProfile:
        """The profile of a script, an empty one for a workload."""
        return self.profile or NO_SCRIPT

    @property
    def uses_one_process(self) -> bool:
        """Return whether one process drives all devices (nn.DataParallel), or could."""
        return self.plan.strategy == "dp"

    @property
    def is_one_process_script(self) -> bool:
        return self.uses_one_process and self.profile is not None

    @property
    def single_device_script(self) -> bool:
        """Return whether a script uses one device although it sees several."""
        return self.is_one_process_script and self.facts.parallel == "none"

    @property
    def can_replay_input(self) -> bool:
        """Return whether batches can be replayed; in a script from a DataLoader or a batch function."""
        known = self.facts.loader is not None or self.facts.batch_function is not None
        return self.profile is None or known

    @property
    def cheapest_input(self) -> Input:
        """The input of least cost that the plan allows, for trials without the real input."""
        if self.plan.input == "resident" or not self.can_replay_input:
            return "real"
        function = self.facts.batch_function
        on_device = function is not None and function.on_device
        return "resident" if self.plan.device == "cuda" and not on_device else host_input(self)

    def actual(self, input_: Input = "real", **interventions: Any) -> Trial:
        """The real run."""
        return Trial(plan=self.plan, variant=Variant(input=input_, **interventions))

    @functools.cached_property
    def baseline(self) -> Trial:
        """One device at the global batch (strong scaling) or at its share (weak)."""
        if self.scaling == "weak":
            return self.one_device("real")
        return self.actual().edit(**ONE_DEVICE)

    def one_device(self, input_: Input, **interventions: Any) -> Trial:
        """One device alone, with its share of the work of N."""
        whole = self.actual(input_, **interventions)
        return whole.edit(batch=self.batch_per_device, **ONE_DEVICE)


# The trials between both ends: N devices with less communication.


def replicas(design: ExperimentDesign, input_: Input, **interventions: Any) -> Trial:
    """Return N independent devices at the same time, each with a process of its own.

    The devices of an operation are always independent.
    """
    plan = design.plan.edit(strategy="ddp") if design.uses_one_process else design.plan
    if design.is_operation:
        return Trial(plan=plan, variant=Variant(input=input_))
    return Trial(plan=plan, variant=Variant(input=input_, independent=True, **interventions))


def no_allreduce(design: ExperimentDesign, input_: Input, devices: tuple[int, ...] = ()) -> Trial:
    """Return data parallel without gradient exchange; rank k drives ``devices[k]``.

    Replicas replace it for a sharded model: no rank has all parameters without communication.
    """
    if design.facts.uses_fsdp:
        return replicas(design, input_, devices=devices)
    return one_allreduce(design, input_).under(exchange="none", devices=devices)


def barrier_only(design: ExperimentDesign, input_: Input) -> Trial:
    """Return data parallel, with an all-reduce of one element per bucket."""
    return one_allreduce(design, input_).under(exchange="barrier")


def one_allreduce(design: ExperimentDesign, input_: Input = "real") -> Trial:
    """Return the real run with no communication but one gradient exchange per step."""
    return design.actual(input_, **dict.fromkeys(extra_collectives(design), False))


def extra_collectives(design: ExperimentDesign) -> tuple[str, ...]:
    """Return the communication besides one gradient exchange, by the field of Variant that removes it.

    The collectives of FSDP cannot be removed one by one.
    """
    facts, plan = design.facts, design.plan
    if facts.uses_fsdp:
        return ()
    present = {
        "synchronised_batch_norm": plan.batch_norm == "synchronised",
        "broadcast_buffers": Variant.broadcast_buffers.is_useful(facts),
        "exchange_each_micro_batch": plan.accumulate > 1
        and Variant.exchange_each_micro_batch.is_useful(facts),
    }
    return tuple(name for name, is_present in present.items() if is_present)


def with_expandable_segments(design: ExperimentDesign, trial: Trial) -> Trial:
    """Return ``trial`` with expandable segments if the allocator of a script had to try again."""
    retried = Variant.expandable_segments.is_useful(design.facts) and design.plan.device != "cpu"
    return trial.under(expandable_segments=True) if retried else trial


def host_input(design: ExperimentDesign) -> Input:
    """Return batches that are ready in host memory; the real input of an operation always is."""
    return "real" if design.is_operation else "replayed"
