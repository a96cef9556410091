"""Variants: interventions that an experiment applies to a plan to measure what something costs.

A variant is separate from a plan because it may change the result of a training: a model that was
trained under a variant is discarded.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import Any, Literal

from nfold.core.errors import UsageError
from nfold.core.plan import Plan
from nfold.core.serialization import deserialize, serialize, stored_name


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Interventions of one experiment; the default has none.

    Attributes:
        input: ``replayed`` and ``resident`` repeat the first batches from the host or the device.
        exchange: gradients are exchanged (``real``), not at all (``none``), with one element per
            bucket in the same order (``barrier``), or with half of the bytes of
            DistributedDataParallel (``half``).
        independent: every device trains by itself, all at the same time.
        device: device of a plan for one device.
        augmentation: images are augmented.
        synchronised_batch_norm: batch norm is synchronised if the plan says so.
        captured: the step is replayed as a CUDA graph.
        threads: threads of a rank on the host.
        pinned: a rank is bound to its own cores.
        devices: rank k drives device ``devices[k]``; empty: device k.
        data_shares: rank k gets the data of rank ``data_shares[k]``; empty: of rank k.
        broadcast_buffers: a wrapper broadcasts buffers before a forward.
        host_syncs: False: values that the host reads from a device in a step (``.item()``) are
            the last ones that were really read, without waiting.
        anomaly_detection: autograd of a script looks for NaN if the script asks for it.
        exchange_each_micro_batch: False: accumulated batches exchange with the last one only.
        find_unused_parameters: a wrapper looks for parameters without a gradient if it is set to.
        expandable_segments: the allocator of a GPU grows its segments in place.
        channels_last: weights of a script's convolutions are in channels_last order.
        compiled: mode of torch.compile for the model of a script that compiles nothing.
        exchange_after_backward: independent devices exchange all gradients at once before an
            optimizer step, without overlap.
        profiler_steps: a script makes some more steps under a profiler, in no window.
        batches_per_epoch: an epoch of a script ends after so many batches of a rank.
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
                raise UsageError(f"{name} {order}: allowed are permutations of 0 to N-1")
        if self.device < 0 or (self.threads is not None and self.threads < 1):
            raise UsageError(
                f"device {self.device}, threads {self.threads}: allowed are whole numbers from "
                "0 and from 1"
            )

    def __bool__(self) -> bool:
        return self != NO_INTERVENTIONS

    @property
    def preserves_training(self) -> bool:
        """Return whether a model trained under this variant is the same as without it."""
        return dataclasses.replace(self, profiler_steps=False) == NO_INTERVENTIONS

    @property
    def ranks_synchronize(self) -> bool:
        return self.exchange != "none" and (not self.independent or self.exchange_after_backward)

    def device_of(self, rank: int, local_rank: int) -> int:
        """Return the index of the device that a rank drives on its host."""
        return self.devices[rank] if self.devices else self.device + local_rank

    def merge(self, other: Variant) -> Variant:
        """Combine the interventions of both; ``other`` overrides."""
        return dataclasses.replace(self, **_non_default_fields(other))

    def refusal(self, plan: Plan) -> str | None:
        """Return why no framework can apply this variant to the complete plan, or None."""
        devices, accumulate = plan.devices or 1, plan.accumulate
        one, dp, ddp = devices == 1, plan.strategy == "dp", plan.strategy == "ddp"
        cpu, step = plan.device == "cpu", str(plan.step)
        changed = self.exchange != "real"
        unused, repeated = self.find_unused_parameters, self.exchange_each_micro_batch
        unsynchronised = not self.synchronised_batch_norm and plan.batch_norm != "synchronised"
        orders = [order for order in (self.devices, self.data_shares) if len(order) != devices]
        refusals = {
            "one device exchanges no gradients": changed and one,
            "nn.DataParallel adds gradients up inside its one process": changed and dp,
            "only DistributedDataParallel has a hook that sends half": self.exchange == "half"
            and not ddp,
            "one device has no other to be independent of": self.independent and one,
            "nn.DataParallel has one process": self.independent and dp,
            "devices that are not independent exchange their gradients themselves": (
                self.exchange_after_backward and not self.independent
            ),
            "a single device is chosen for a plan on one device": self.device > 0 and not one,
            "one device broadcasts no buffers": not self.broadcast_buffers and one,
            "only DistributedDataParallel looks for parameters without a gradient": (
                not unused and (one or not ddp)
            ),
            "gradients are exchanged once a step": not repeated and (one or accumulate == 1),
            "nn.DataParallel copies the whole module, including buffers": (
                not self.broadcast_buffers and dp
            ),
            **{f"{order} is not an order of {devices} devices": order != () for order in orders},
            "the data are on the device": self.input != "real" and plan.input == "resident",
            "batch norm is not synchronised": unsynchronised,
            "the step is captured already": self.captured and "captured" in step,
            "operations on a CPU device are synchronous: no host read waits": (
                not self.host_syncs and cpu
            ),
            "the layout is channels_last already": (
                self.channels_last and plan.layout == "channels_last"
            ),
            "the step is compiled already": bool(self.compiled) and "compiled" in step,
            "nn.DataParallel replicates the module in every step, and replicas are not compiled": (
                bool(self.compiled) and dp and plan.device == "cuda"
            ),
            "CPU devices use the system's memory, which has no segments": (
                self.expandable_segments and cpu
            ),
        }
        return next((reason for reason, refused in refusals.items() if refused), None)

    def to_dict(self) -> dict[str, object]:
        """Return JSON values. Defaults are omitted, so that ids survive new fields."""
        values: dict[str, object] = serialize(_stored_fields(self))
        return values

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> Variant:
        """Return the variant that ``to_dict`` wrote. Raises ValueError for an unknown entry."""
        return deserialize(cls, values)

    def __str__(self) -> str:
        words = [f"{name} {value}" for name, value in _stored_fields(self).items()]
        return ", ".join(words) or "no interventions"


NO_INTERVENTIONS = Variant()


def _non_default_fields(variant: Variant) -> dict[str, Any]:
    values = {f.name: (getattr(variant, f.name), f.default) for f in fields(variant)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _stored_fields(variant: Variant) -> dict[str, Any]:
    changed = _non_default_fields(variant)
    return {stored_name(Variant, name): value for name, value in changed.items()}
