"""The ladder: the runs that differ by one thing each, from one device alone to the real run.

The work of a device in a step is the same on every rung: one device alone, independent copies of
it at the same time, data parallel without an exchange, with a barrier only, and the real run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from nfold.ablation import Ablation
from nfold.explain.clocks import Clock
from nfold.explain.rung import Rung, growing
from nfold.measurement import PausedAt
from nfold.plan import USED_UP, Plan
from nfold.seen import Maker, Seen

Make = TypeVar("Make", bound=Callable[..., Rung])
Input = Literal["real", "replayed", "resident"]
Scaling = Literal["strong", "weak"]
PREFETCH = 2
"""Batches that a loader's worker makes ahead, where nothing else is said."""


def remembered(make: Make) -> Make:
    """The same object for the same rung: intervals ask for each some thousand times."""

    @functools.wraps(make)
    def asked(ladder: Ladder, *args: Any, **kwargs: Any) -> Rung:
        key = (make.__name__, args, tuple(kwargs.items()))
        if key not in ladder.made:
            ladder.made[key] = make(ladder, *args, **kwargs)
        return ladder.made[key]

    return cast(Make, asked)


def made_ahead(workers: int, prefetch_factor: int | None = None) -> int:
    """Batches that warm-up lets pass, until what workers made before the first step is used up."""
    return USED_UP * workers * (prefetch_factor or PREFETCH)


@dataclass(frozen=True, kw_only=True)
class Ladder:
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
    seen: Seen | None = field(default=None, compare=False)
    step_ms: float | None = field(default=None, compare=False)
    pauses_ms: tuple[float, ...] = field(default=(), compare=False)
    paused_at: tuple[tuple[PausedAt, ...], ...] = field(default=(), compare=False)
    memory_bytes: int | None = field(default=None, compare=False)
    clocks: tuple[Clock, ...] = field(default=(), compare=False)
    operation: bool = field(default=False, compare=False)
    failed: str = field(default="", compare=False)
    asked: bool = field(default=False, compare=False)
    made: dict[tuple[object, ...], Rung] = field(default_factory=dict, compare=False, repr=False)

    @property
    def devices(self) -> int:
        """N."""
        return self.plan.devices or 1

    @property
    def share(self) -> int:
        """The samples of one device in a step, on the fullest one."""
        return -(-(self.plan.batch or 1) // self.devices)

    @property
    def split(self) -> int:
        """How many devices share the work of one in a step; with weak scaling each has its own."""
        return self.devices if self.scaling == "strong" else 1

    @property
    def one_process(self) -> bool:
        """Whether one process drives all devices (nn.DataParallel), or could."""
        return self.plan.strategy == "dp"

    @property
    def plain(self) -> bool:
        """Whether a script uses one device, whatever it sees."""
        return self.one_process and self.seen is not None and self.seen.parallel == "none"

    @property
    def sharded(self) -> bool:
        """Whether each rank of a script holds a part of the parameters (FSDP)."""
        return self.seen is not None and self.seen.parallel == "fsdp"

    @property
    def reads_back(self) -> bool:
        """Whether the host of a script waits for values of a GPU in its steps."""
        seen = self.seen
        return seen is not None and seen.host_syncs > 0 and self.plan.device == "cuda"

    @property
    def detects_anomalies(self) -> bool:
        """Whether autograd looks for NaN in every backward of a script."""
        return self.seen is not None and self.seen.detects_anomalies

    @property
    def tries_again(self) -> bool:
        """Whether a script's allocator was seen to have no memory left in its steps."""
        seen = self.seen
        return seen is not None and seen.alloc_retries > 0 and self.plan.device != "cpu"

    @property
    def rebatches(self) -> bool:
        """Whether there are batches of another size: a script's only of a DataLoader."""
        return self.seen is None or self.seen.rebatches

    @property
    def feeds(self) -> bool:
        """Whether the input can be replaced: a script's, if a DataLoader or a function makes it."""
        seen = self.seen
        return seen is None or seen.loader is not None or seen.maker is not None

    @property
    def maker(self) -> Maker | None:
        """The functions of a script that make its batches, where no DataLoader does."""
        return self.seen.maker if self.seen is not None else None

    @property
    def bare(self) -> Input:
        """The input that costs least and can be had: the ladder's, free of the real input."""
        if self.plan.input == "resident" or not self.feeds:
            return "real"
        moved = self.maker is not None and self.maker.on_device
        return "resident" if self.plan.device == "cuda" and not moved else self.on_host

    @property
    def on_host(self) -> Input:
        """Batches that are ready in the host's memory: an operation's always are."""
        return "real" if self.operation else "replayed"

    @functools.cached_property
    def one(self) -> Rung:
        """What N-fold is counted from: one device at the global batch, or at its share of it."""
        if self.scaling == "weak":
            return self.alone("real")
        return Rung(plan=self._on_one(batch=self.plan.batch))

    @remembered
    def alone(self, input_: Input, device: int = 0, **changes: Any) -> Rung:
        """One device alone, with the work that it has among N."""
        plan = self._on_one(batch=self.share).edit(**changes)
        return Rung(plan=plan, ablation=Ablation(input=input_, device=device))

    @remembered
    def alone_with(self, input_: Input, **left_out: Any) -> Rung:
        """One device alone, with something more left out."""
        ablation = Ablation(input=input_, **left_out)
        return Rung(plan=self._on_one(batch=self.share), ablation=ablation)

    @property
    def unwaited(self) -> Rung:
        """One device alone with the input that costs least, whose host waits for no value."""
        return self.alone_with(
            self.bare,
            host_syncs=not self.reads_back,
            anomaly_detection=not self.detects_anomalies,
        )

    def grown(self, rung: Rung) -> Rung:
        """The same with segments that grow, where a script's allocator was seen to try again."""
        return growing(rung) if self.tries_again else rung

    @remembered
    def copies(self, input_: Input, **left_out: Any) -> Rung:
        """N devices at the same time, each by itself; a script's one process is then N.

        Those of an operation always are.
        """
        plan = self.plan.edit(strategy="ddp") if self.one_process else self.plan
        if self.operation:
            return Rung(plan=plan, ablation=Ablation(input=input_))
        return Rung(plan=plan, ablation=Ablation(input=input_, independent=True, **left_out))

    @remembered
    def unexchanged(self, input_: Input, devices: tuple[int, ...] = ()) -> Rung:
        """Data parallel, with nothing exchanged; ranks drive ``devices`` in this order.

        Without an exchange no rank has the parameters of a sharded model: copies stand for it.
        """
        if self.sharded:
            return self.copies(input_, devices=devices)
        left_out = Ablation(input=input_, exchange="none", devices=devices)
        return Rung(plan=self.plan, ablation=left_out.merged(self.beside_gradients))

    @remembered
    def barrier(self, input_: Input) -> Rung:
        """Data parallel, with one element a bucket exchanged."""
        left_out = Ablation(input=input_, exchange="barrier")
        return Rung(plan=self.plan, ablation=left_out.merged(self.beside_gradients))

    @remembered
    def full(self, input_: Input = "real", **left_out: Any) -> Rung:
        """The real run, without what is said to be left out."""
        return Rung(plan=self.plan, ablation=Ablation(input=input_, **left_out))

    @remembered
    def lean(self, input_: Input = "real") -> Rung:
        """The real run with nothing but one exchange of gradients a step."""
        return Rung(plan=self.plan, ablation=Ablation(input=input_).merged(self.beside_gradients))

    @remembered
    def edited(self, **changes: Any) -> Rung:
        """The real run under another plan."""
        return Rung(plan=self.plan.edit(**changes))

    @property
    def synchronises_batch_norm(self) -> bool:
        """Whether ranks exchange statistics in forward."""
        return self.plan.batch_norm == "synchronised"

    def epoch_steps(self, plan: Plan) -> int | None:
        """Steps of an epoch of a script, None where nobody has seen its length."""
        fed = self.seen.loader if self.seen is not None else None
        if fed is None or fed.samples is None:
            return None
        return -(-fed.samples // (plan.batch or 1))

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether a script's wrapper sends buffers to all ranks in every forward."""
        seen = self.seen
        return seen is not None and seen.broadcast_buffers and seen.buffers > 0

    @property
    def exchanges_repeatedly(self) -> bool:
        """Whether a script's gradients are exchanged with every batch of a step."""
        seen = self.seen
        return seen is not None and self.plan.accumulate > 1 and seen.exchanges > 1

    @functools.cached_property
    def beside_gradients(self) -> Ablation:
        """What would couple ranks that must not be, and is not a step's one exchange."""
        if self.sharded:
            return Ablation()
        return Ablation(
            synchronised_batch_norm=not self.synchronises_batch_norm,
            buffers=not self.broadcasts_buffers,
            repeated_exchange=not self.exchanges_repeatedly,
        )

    def _on_one(self, batch: int | None) -> Plan:
        return self.plan.edit(devices=1, strategy="single", batch=batch)
