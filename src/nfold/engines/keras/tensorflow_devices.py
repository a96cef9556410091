"""TensorFlow's devices and the strategy over them: what is split, kept everywhere, summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from nfold.core.errors import Unsupported
from nfold.core.machine import peak_resident_bytes
from nfold.core.plan import Plan
from nfold.engines.sampling import split_batch

Tensor = Any
Value = Any  # A tensor, or with several replicas one for each (``tf.distribute.DistributedValues``)


@dataclass(frozen=True)
class TensorFlowReplicas:
    """A strategy and its devices, as ``/device:CPU:0``."""

    strategy: Any
    devices: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many."""
        return len(self.devices)

    def describe(self) -> str:
        """For example ``cpu:0, cpu:1``."""
        parts = (name.rpartition("device:")[2].lower() for name in self.devices)
        return ", ".join(part.replace("gpu", "cuda") for part in parts)

    def slices(self, samples: int) -> list[tuple[int, int, float]]:
        """Every replica's slice of a batch, and what its mean counts in the batch's mean.

        A replica without a sample gets the batch's first, which counts 0.
        """
        found = []
        for index in range(self.count):
            (own,) = split_batch(samples, index, self.count, 1)
            stop = own.stop if own else 1
            found.append((own.start if own else 0, stop, len(own) / samples))
        return found

    def loss_weights(self, cuts: Sequence[tuple[int, int, float]]) -> Value:
        """What every replica's mean counts: float32 []."""
        return self._per_replica([np.float32(weight) for _, _, weight in cuts])

    def split(
        self, values: npt.NDArray[Any], cuts: Sequence[tuple[int, int, float]], *, axis: int
    ) -> Value:
        """Every replica's slice along one axis."""
        before = (slice(None),) * axis
        return self._per_replica([values[(*before, slice(a, b))] for a, b, _ in cuts])

    def replicate(self, values: npt.NDArray[Any]) -> Value:
        """The same on every replica."""
        return self._per_replica([values] * self.count)

    def _per_replica(self, values: Sequence[Any]) -> Value:
        tensors = []
        for device, value in zip(self.devices, values, strict=True):
            with tf.device(device):
                tensors.append(tf.constant(value))
        if self.count == 1:
            return tensors[0]
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: tensors[context.replica_id_in_sync_group]
        )

    def local_tensors(self, value: Value) -> tuple[Tensor, ...]:
        """The replicas' own tensors."""
        found: tuple[Tensor, ...] = self.strategy.experimental_local_results(value)
        return found

    def run_and_sum(self, function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
        """Run on every replica; the sum of what they return."""
        returned = self.strategy.run(function, args=arguments)
        if self.count == 1:
            return returned
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, returned, axis=None)

    def memory(self) -> dict[str, int | None]:
        """Of the fullest GPU what tensors used at most; on CPUs the peak RSS.

        By default TensorFlow takes a GPU's memory up to its limit when it starts; under growth it
        does not say what it has taken.
        """
        names = [name.rpartition("device:")[2] for name in self.devices]
        if names[0].startswith("CPU"):
            return {"peak_memory_bytes": peak_resident_bytes(), "reserved_memory_bytes": None}
        found = [tf.config.experimental.get_memory_info(name)["peak"] for name in names]
        return {"peak_memory_bytes": max(found), "reserved_memory_bytes": None}


def open_replicas(plan: Plan) -> TensorFlowReplicas:
    """The plan's devices, opened; raises Unsupported where TensorFlow does not see them.

    A CPU device is a logical one: all share one pool of threads, as large as their cores.
    """
    count = plan.devices or 1
    tf.config.experimental.enable_tensor_float_32_execution(plan.precision == "tf32")
    if plan.device == "cpu":
        _create_cpu_devices(count, plan.cores_per_device or 1)
    kind = "GPU" if plan.device == "cuda" else "CPU"
    seen = tf.config.list_logical_devices(kind)
    if len(seen) < count:
        raise Unsupported(
            f"TensorFlow {tf.__version__} sees {len(seen)} {plan.device} devices, the plan has "
            f"{count}; next: --framework torch or jax"
        )
    names = tuple(f"/device:{kind}:{index}" for index in range(count))
    return TensorFlowReplicas(_strategy(plan, names), names)


def _create_cpu_devices(count: int, cores: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(count * cores)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, count))
    (host,) = tf.config.list_physical_devices("CPU")
    one = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(host, [one] * count)


def _strategy(plan: Plan, names: tuple[str, ...]) -> Any:
    if len(names) == 1:
        return tf.distribute.get_strategy()
    on_cpu = plan.device == "cpu"
    exchange = tf.distribute.ReductionToOneDevice() if on_cpu else None
    return tf.distribute.MirroredStrategy(list(names), cross_device_ops=exchange)
