"""What an experiment takes away from a plan to learn its cost.

A type of its own on purpose: a plan can ship, an ablation never can. What is trained under one
is thrown away.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import Any, Literal

from nfold.core.errors import UsageError
from nfold.core.plan import Plan
from nfold.core.serialization import deserialize, serialize, stored_name

RefusalRule = tuple[bool, str]
"""Whether something is refused, and why."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The parts of a run that an experiment leaves out. The empty one leaves out nothing.

    ``input``: the first batches again, kept on the host or on the device. ``exchange`` of
    gradients: none, a barrier (one element a bucket, in the same order), or half of the bytes of
    a script's DistributedDataParallel. ``independent``:
    every device trains by itself, all at the same time. ``device`` is which device a plan for
    one is run on. ``augmentation`` and ``synchronised_batch_norm`` can be left out, ``captured``
    replays the step as a CUDA graph, ``threads`` is what a rank computes with on the host and
    ``pinned`` whether it keeps to its own cores. Rank k drives device ``devices[k]`` and has the
    share of the data of rank ``shares[k]``; empty: k. Without ``buffers``, a wrapper does not
    broadcast them before a forward; without ``host_syncs``, what the host reads from a device
    in a step (``.item()``) is the last value that was really read, and nobody waits for it.
    Without ``anomaly_detection``, a script's autograd looks for no NaN.
    Without ``repeated_exchange``, a step of several batches exchanges with the last one only.
    Without ``unused_parameters``, a wrapper that is told to look for parameters without a gradient
    does not.
    With ``late_exchange``, independent devices exchange all gradients at once, before a step of the
    optimizer, and nothing hides it. With ``expandable_segments``, the allocator of a GPU lets what
    it keeps grow in place, where it would give back and ask again. With ``channels_last``, the
    weights of a script's convolutions have that order in memory, and what they compute follows.
    ``compiled`` is a mode of torch.compile, for the model of a script that compiles nothing.
    With ``traced``, a script makes some steps more, under a profiler and in no window. With
    ``pass_batches``, a pass over a script's training data ends after so many batches of a rank.
    """

    input: Literal["real", "replayed", "resident"] = "real"
    exchange: Literal["real", "none", "barrier", "half"] = "real"
    independent: bool = False
    device: int = 0
    augmentation: bool = True
    synchronised_batch_norm: bool = True
    captured: bool = False
    threads: int | None = None
    pinned: bool = True
    devices: tuple[int, ...] = ()
    data_shares: tuple[int, ...] = ()
    broadcast_buffers: bool = True
    host_syncs: bool = True
    anomaly_detection: bool = True
    exchange_each_micro_batch: bool = True
    find_unused_parameters: bool = True
    expandable_segments: bool = False
    channels_last: bool = False
    compiled: Literal["", "default", "reduce-overhead"] = ""
    exchange_after_backward: bool = False
    profiler_steps: bool = False
    batches_per_epoch: int | None = None

    def __post_init__(self) -> None:
        for name in ("devices", "data_shares"):
            order = getattr(self, name)
            if sorted(order) != list(range(len(order))):
                raise UsageError(f"{name} {order}: allowed is an order of 0 to N-1")
        if self.device < 0 or (self.threads is not None and self.threads < 1):
            raise UsageError(
                f"device {self.device}, threads {self.threads}: allowed are whole numbers from "
                "0 and from 1"
            )

    def __bool__(self) -> bool:
        return self != NO_INTERVENTIONS

    @property
    def preserves_training(self) -> bool:
        """Whether a training under it is the user's own: nothing is left out of a step."""
        return dataclasses.replace(self, profiler_steps=False) == NO_INTERVENTIONS

    @property
    def ranks_synchronize(self) -> bool:
        """Whether ranks still wait for each other in every step."""
        return self.exchange != "none" and (not self.independent or self.exchange_after_backward)

    def device_of(self, rank: int, local_rank: int) -> int:
        """The device that a rank drives, by its place on its host."""
        return self.devices[rank] if self.devices else self.device + local_rank

    def merge(self, other: Variant) -> Variant:
        """What both leave out; where both say something, ``other`` counts."""
        return dataclasses.replace(self, **_non_default_fields(other))

    def refusal(self, plan: Plan) -> str | None:
        """Why this cannot be taken away from the complete plan, whatever the framework, or None."""
        rules = (*self._among_devices(plan), *self._inside_a_step(plan))
        return next((reason for refused, reason in rules if refused), None)

    def _among_devices(self, plan: Plan) -> tuple[RefusalRule, ...]:
        devices = plan.devices or 1
        one = devices == 1
        return (
            (self.exchange != "real" and one, "one device exchanges no gradients"),
            (
                self.exchange != "real" and plan.strategy == "dp",
                "nn.DataParallel adds gradients up inside its one process",
            ),
            (
                self.exchange == "half" and plan.strategy != "ddp",
                "only DistributedDataParallel has a hook that sends half",
            ),
            (self.independent and one, "one device has no other to be independent of"),
            (self.independent and plan.strategy == "dp", "nn.DataParallel has one process"),
            (
                self.exchange_after_backward and not self.independent,
                "devices that are not independent exchange their gradients themselves",
            ),
            (self.device > 0 and not one, "a single device is chosen for a plan on one device"),
            (not self.broadcast_buffers and one, "one device broadcasts no buffers"),
            (
                not self.find_unused_parameters and (one or plan.strategy != "ddp"),
                "only DistributedDataParallel looks for parameters without a gradient",
            ),
            (
                not self.exchange_each_micro_batch and (one or plan.accumulate == 1),
                "gradients are exchanged once a step",
            ),
            (
                not self.broadcast_buffers and plan.strategy == "dp",
                "nn.DataParallel copies the whole module, not its buffers alone",
            ),
            *(
                (len(o) not in (0, devices), f"{o} is no order of {devices} devices")
                for o in (self.devices, self.data_shares)
            ),
        )

    def _inside_a_step(self, plan: Plan) -> tuple[RefusalRule, ...]:
        return (
            (self.input != "real" and plan.input == "resident", "the data are on the device"),
            (
                not self.synchronised_batch_norm and plan.batch_norm != "synchronised",
                "batch norm is not synchronised",
            ),
            (self.captured and "captured" in str(plan.step), "the step is captured already"),
            (
                not self.host_syncs and plan.device == "cpu",
                "on a CPU device an operation is done when its call returns: nothing waits",
            ),
            (
                self.channels_last and plan.layout == "channels_last",
                "the layout is channels_last already",
            ),
            (
                bool(self.compiled) and "compiled" in str(plan.step),
                "the step is compiled already",
            ),
            (
                bool(self.compiled) and plan.strategy == "dp" and plan.device == "cuda",
                "nn.DataParallel copies the module in every step: its copies are not compiled",
            ),
            (
                self.expandable_segments and plan.device == "cpu",
                "memory of CPU devices is the system's, no allocator keeps it",
            ),
        )

    def to_dict(self) -> dict[str, object]:
        """What is left out, as plain JSON values; a default is not written: ids stay."""
        values: dict[str, object] = serialize(_stored_fields(self))
        return values

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> Variant:
        """The ablation that ``to_dict`` wrote; an unknown entry is refused, never ignored."""
        return deserialize(cls, values)

    def __str__(self) -> str:
        words = [f"{name} {value}" for name, value in _stored_fields(self).items()]
        return ", ".join(words) or "nothing left out"


NO_INTERVENTIONS = Variant()
"""The empty one."""


def _non_default_fields(ablation: Variant) -> dict[str, Any]:
    values = {f.name: (getattr(ablation, f.name), f.default) for f in fields(ablation)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _stored_fields(variant: Variant) -> dict[str, Any]:
    changed = _non_default_fields(variant)
    return {stored_name(Variant, name): value for name, value in changed.items()}
