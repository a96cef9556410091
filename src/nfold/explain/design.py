"""A rung of the ladder, and the same one measured in another way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from nfold.core.measurement import HostGapLocation
from nfold.core.plan import PREFETCH_WARMUP_FACTOR, WARMUP_STEPS, Plan
from nfold.core.script_profile import BatchFunction, ScriptProfile
from nfold.core.variant import Variant
from nfold.explain.metrics import GpuClockRate

WHOLE_EPOCHS = 3
"""Of a run of whole epochs."""
SHORT_EPOCH_STEPS, SHORT_EPOCHS = 11, 3
"""Of a pass that is cut short, and how many follow the first one.

A prime: what comes after every 5th or 10th step of a script does not come where a pass ends.
"""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One question: a complete plan and what is left out. Equal ones are the same question."""

    plan: Plan
    variant: Variant = field(default_factory=Variant)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.plan, self.variant))

    def __hash__(self) -> int:
        return self._hash

    @property
    def ranks_synchronize(self) -> bool:
        """Whether its ranks wait for each other."""
        return self.variant.ranks_synchronize

    def __str__(self) -> str:
        devices = self.plan.devices or 1
        words = f"{devices} device{'s' * (devices != 1)}"
        words += ", a first look" if self.plan.batch is None else f", batch {self.plan.batch}"
        words += ", whole epochs" if self.plan.epochs else ""
        return words if self.variant.preserves_training else f"{words}, {self.variant}"


@functools.cache
def over_whole_epochs(trial: Trial) -> Trial:
    """The same run, measured in epochs; what was made ahead is used up when the first one ends."""
    warmup = min(WARMUP_STEPS, trial.plan.warmup_steps or WARMUP_STEPS)
    plan = trial.plan.edit(epochs=WHOLE_EPOCHS, steps=None, warmup_steps=warmup)
    return Trial(plan=plan, variant=trial.variant)


@functools.cache
def over_short_epochs(trial: Trial) -> Trial:
    """The same run of a script, in passes of so few steps that some end while it is measured.

    The first is the warm-up: what was made ahead is used up when it ends.
    """
    plan = trial.plan.edit(
        steps=SHORT_EPOCHS * SHORT_EPOCH_STEPS, epochs=None, warmup_steps=SHORT_EPOCH_STEPS
    )
    left_out = Variant(batches_per_epoch=SHORT_EPOCH_STEPS * trial.plan.accumulate)
    return Trial(plan=plan, variant=trial.variant.merge(left_out))


@functools.cache
def with_expandable_segments(trial: Trial) -> Trial:
    """The same with segments of memory that grow in place."""
    left_out = trial.variant.merge(Variant(expandable_segments=True))
    return Trial(plan=trial.plan, variant=left_out)


# The ladder: the runs that differ by one thing each, from one device alone to the real run.
#
# The work of a device in a step is the same on every rung: one device alone, independent copies of
# it at the same time, data parallel without an exchange, with a barrier only, and the real run.

TrialFactory = TypeVar("TrialFactory", bound=Callable[..., Trial])
Input = Literal["real", "replayed", "resident"]
Scaling = Literal["strong", "weak"]
DEFAULT_PREFETCH_FACTOR = 2
"""Batches that a loader's worker makes ahead, where nothing else is said."""


def cached_trial(factory: TrialFactory) -> TrialFactory:
    """The same object for the same rung: intervals ask for each some thousand times."""

    @functools.wraps(factory)
    def asked(ladder: ExperimentDesign, *args: Any, **kwargs: Any) -> Trial:
        key = (factory.__name__, args, tuple(kwargs.items()))
        if key not in ladder.trial_cache:
            ladder.trial_cache[key] = factory(ladder, *args, **kwargs)
        return ladder.trial_cache[key]

    return cast(TrialFactory, asked)


def prefetched_batches(workers: int, prefetch_factor: int | None = None) -> int:
    """Batches that warm-up lets pass, until what workers made before the first step is used up."""
    return PREFETCH_WARMUP_FACTOR * workers * (prefetch_factor or DEFAULT_PREFETCH_FACTOR)


@dataclass(frozen=True, kw_only=True)
class ExperimentDesign:
    """The rungs of one complete ``plan`` on N devices, measured in steps.

    ``seen`` is what a first look at a script showed, ``step_ms`` how long its steps took there,
    where nothing had been made ahead of them, ``pauses_ms`` what the host of each rank usually did
    between two, and ``paused_at`` where each was while it made none; None and none for a workload.
    ``memory_bytes`` is that of one device, ``clocks`` are those of all while none waits. An
    ``operation`` has calls for steps, and neither gradients nor a loader. ``failed`` is why a
    script did not train as a process a device, where it did as one process; ``asked`` whether a
    person said what is to scale.
    """

    plan: Plan
    scaling: Scaling = "strong"
    profile: ScriptProfile | None = field(default=None, compare=False)
    step_ms: float | None = field(default=None, compare=False)
    host_gaps_ms: tuple[float, ...] = field(default=(), compare=False)
    gap_locations: tuple[tuple[HostGapLocation, ...], ...] = field(default=(), compare=False)
    memory_bytes: int | None = field(default=None, compare=False)
    clock_rates: tuple[GpuClockRate, ...] = field(default=(), compare=False)
    is_operation: bool = field(default=False, compare=False)
    multi_process_failure: str = field(default="", compare=False)
    scaling_requested: bool = field(default=False, compare=False)
    trial_cache: dict[tuple[object, ...], Trial] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def devices(self) -> int:
        """N."""
        return self.plan.devices or 1

    @property
    def batch_per_device(self) -> int:
        """The samples of one device in a step, on the fullest one."""
        return -(-(self.plan.batch or 1) // self.devices)

    @property
    def work_divisor(self) -> int:
        """How many devices share the work of one in a step; with weak scaling each has its own."""
        return self.devices if self.scaling == "strong" else 1

    @property
    def uses_one_process(self) -> bool:
        """Whether one process drives all devices (nn.DataParallel), or could."""
        return self.plan.strategy == "dp"

    @property
    def single_device_script(self) -> bool:
        """Whether a script uses one device, whatever it sees."""
        return (
            self.uses_one_process and self.profile is not None and self.profile.parallel == "none"
        )

    @property
    def sharded(self) -> bool:
        """Whether each rank of a script holds a part of the parameters (FSDP)."""
        return self.profile is not None and self.profile.parallel == "fsdp"

    @property
    def has_host_reads(self) -> bool:
        """Whether the host of a script waits for values of a GPU in its steps."""
        seen = self.profile
        return seen is not None and seen.host_syncs > 0 and self.plan.device == "cuda"

    @property
    def detects_anomalies(self) -> bool:
        """Whether autograd looks for NaN in every backward of a script."""
        return self.profile is not None and self.profile.detects_anomalies

    @property
    def has_allocator_retries(self) -> bool:
        """Whether a script's allocator was seen to have no memory left in its steps."""
        seen = self.profile
        return seen is not None and seen.alloc_retries > 0 and self.plan.device != "cpu"

    @property
    def can_change_batch(self) -> bool:
        """Whether there are batches of another size: a script's only of a DataLoader."""
        return self.profile is None or self.profile.accepts_batch_size

    @property
    def can_replay_input(self) -> bool:
        """Whether the input can be replaced: a script's, if a DataLoader or a function makes it."""
        seen = self.profile
        return seen is None or seen.loader is not None or seen.batch_function is not None

    @property
    def batch_function(self) -> BatchFunction | None:
        """The functions of a script that make its batches, where no DataLoader does."""
        return self.profile.batch_function if self.profile is not None else None

    @property
    def cheapest_input(self) -> Input:
        """The input that costs least and can be had: the ladder's, free of the real input."""
        if self.plan.input == "resident" or not self.can_replay_input:
            return "real"
        moved = self.batch_function is not None and self.batch_function.on_device
        return "resident" if self.plan.device == "cuda" and not moved else self.host_input

    @property
    def host_input(self) -> Input:
        """Batches that are ready in the host's memory: an operation's always are."""
        return "real" if self.is_operation else "replayed"

    @functools.cached_property
    def baseline(self) -> Trial:
        """What N-fold is counted from: one device at the global batch, or at its share of it."""
        if self.scaling == "weak":
            return self.one_device("real")
        return Trial(plan=self._one_device_plan(batch=self.plan.batch))

    @cached_trial
    def one_device(self, input_: Input, device: int = 0, **changes: Any) -> Trial:
        """One device alone, with the work that it has among N."""
        plan = self._one_device_plan(batch=self.batch_per_device).edit(**changes)
        return Trial(plan=plan, variant=Variant(input=input_, device=device))

    @cached_trial
    def one_device_with(self, input_: Input, **left_out: Any) -> Trial:
        """One device alone, with something more left out."""
        ablation = Variant(input=input_, **left_out)
        return Trial(plan=self._one_device_plan(batch=self.batch_per_device), variant=ablation)

    @property
    def no_host_sync(self) -> Trial:
        """One device alone with the input that costs least, whose host waits for no value."""
        return self.one_device_with(
            self.cheapest_input,
            host_syncs=not self.has_host_reads,
            anomaly_detection=not self.detects_anomalies,
        )

    def with_expandable_segments(self, trial: Trial) -> Trial:
        """The same with segments that grow, where a script's allocator was seen to try again."""
        return with_expandable_segments(trial) if self.has_allocator_retries else trial

    @cached_trial
    def replicas(self, input_: Input, **left_out: Any) -> Trial:
        """N devices at the same time, each by itself; a script's one process is then N.

        Those of an operation always are.
        """
        plan = self.plan.edit(strategy="ddp") if self.uses_one_process else self.plan
        if self.is_operation:
            return Trial(plan=plan, variant=Variant(input=input_))
        return Trial(plan=plan, variant=Variant(input=input_, independent=True, **left_out))

    @cached_trial
    def no_allreduce(self, input_: Input, devices: tuple[int, ...] = ()) -> Trial:
        """Data parallel, with nothing exchanged; ranks drive ``devices`` in this order.

        Without an exchange no rank has the parameters of a sharded model: copies stand for it.
        """
        if self.sharded:
            return self.replicas(input_, devices=devices)
        left_out = Variant(input=input_, exchange="none", devices=devices)
        return Trial(plan=self.plan, variant=left_out.merge(self.gradients_only))

    @cached_trial
    def barrier_only(self, input_: Input) -> Trial:
        """Data parallel, with one element a bucket exchanged."""
        left_out = Variant(input=input_, exchange="barrier")
        return Trial(plan=self.plan, variant=left_out.merge(self.gradients_only))

    @cached_trial
    def actual(self, input_: Input = "real", **left_out: Any) -> Trial:
        """The real run, without what is said to be left out."""
        return Trial(plan=self.plan, variant=Variant(input=input_, **left_out))

    @cached_trial
    def one_allreduce(self, input_: Input = "real") -> Trial:
        """The real run with nothing but one exchange of gradients a step."""
        return Trial(plan=self.plan, variant=Variant(input=input_).merge(self.gradients_only))

    @cached_trial
    def with_plan(self, **changes: Any) -> Trial:
        """The real run under another plan."""
        return Trial(plan=self.plan.edit(**changes))

    @property
    def synchronises_batch_norm(self) -> bool:
        """Whether ranks exchange statistics in forward."""
        return self.plan.batch_norm == "synchronised"

    def epoch_steps(self, plan: Plan) -> int | None:
        """Steps of an epoch of a script, None where nobody has seen its length."""
        fed = self.profile.loader if self.profile is not None else None
        if fed is None or fed.dataset_size is None:
            return None
        return -(-fed.dataset_size // (plan.batch or 1))

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether a script's wrapper sends buffers to all ranks in every forward."""
        seen = self.profile
        return seen is not None and seen.broadcast_buffers and seen.buffers > 0

    @property
    def all_reduces_every_batch(self) -> bool:
        """Whether a script's gradients are exchanged with every batch of a step."""
        seen = self.profile
        return seen is not None and self.plan.accumulate > 1 and seen.gradient_exchanges > 1

    @functools.cached_property
    def gradients_only(self) -> Variant:
        """What would couple ranks that must not be, and is not a step's one exchange."""
        if self.sharded:
            return Variant()
        return Variant(
            synchronised_batch_norm=not self.synchronises_batch_norm,
            broadcast_buffers=not self.broadcasts_buffers,
            exchange_each_micro_batch=not self.all_reduces_every_batch,
        )

    def _one_device_plan(self, batch: int | None) -> Plan:
        return self.plan.edit(devices=1, strategy="single", batch=batch)
