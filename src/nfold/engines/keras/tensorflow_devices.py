"""TensorFlow's devices of a plan and the strategy over them: split, replicate, sum."""

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
    """A strategy and the names of its devices, for example ``/device:CPU:0``."""

    strategy: Any
    devices: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.devices)

    def describe(self) -> str:
        parts = (name.rpartition("device:")[2].lower() for name in self.devices)
        return ", ".join(part.replace("gpu", "cuda") for part in parts)

    def slices(self, samples: int) -> list[tuple[int, int, float]]:
        """Return (start, stop, weight in the mean) of every replica's slice of a batch.

        A replica without a sample gets the first sample with weight 0.
        """
        slices = []
        for index in range(self.count):
            (own,) = split_batch(samples, index, self.count, 1)
            start, stop = (own.start, own.stop) if own else (0, 1)
            slices.append((start, stop, len(own) / samples))
        return slices

    def loss_weights(self, cuts: Sequence[tuple[int, int, float]]) -> Value:
        """Return every replica's weight in the mean loss: float32 []."""
        return self._per_replica([np.float32(weight) for _, _, weight in cuts])

    def split(
        self, values: npt.NDArray[Any], cuts: Sequence[tuple[int, int, float]], *, axis: int
    ) -> Value:
        """Copy every replica's slice along an axis to it."""
        before = (slice(None),) * axis
        return self._per_replica([values[(*before, slice(a, b))] for a, b, _ in cuts])

    def replicate(self, values: npt.NDArray[Any]) -> Value:
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
        tensors: tuple[Tensor, ...] = self.strategy.experimental_local_results(value)
        return tensors

    def run_and_sum(self, function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
        results = self.strategy.run(function, args=arguments)
        if self.count == 1:
            return results
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, results, axis=None)

    def memory(self) -> dict[str, int | None]:
        """Return the peak memory of tensors on the GPU with most; on CPUs the peak RSS.

        TensorFlow does not report how much memory it reserved.
        """
        names = [name.rpartition("device:")[2] for name in self.devices]
        if names[0].startswith("CPU"):
            return {"peak_memory_bytes": peak_resident_bytes(), "reserved_memory_bytes": None}
        peaks = [tf.config.experimental.get_memory_info(name)["peak"] for name in names]
        return {"peak_memory_bytes": max(peaks), "reserved_memory_bytes": None}


def open_devices(plan: Plan) -> TensorFlowReplicas:
    """Open the plan's devices; raises Unsupported if TensorFlow does not see them.

    CPU devices are logical devices that share one thread pool with the cores of all.
    """
    count = plan.devices or 1
    tf.config.experimental.enable_tensor_float_32_execution(plan.precision == "tf32")
    if plan.device == "cpu":
        threads = count * (plan.cores_per_device or 1)
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, count))
        (host,) = tf.config.list_physical_devices("CPU")
        logical = [tf.config.LogicalDeviceConfiguration()] * count
        tf.config.set_logical_device_configuration(host, logical)
    kind = "GPU" if plan.device == "cuda" else "CPU"
    seen = tf.config.list_logical_devices(kind)
    if len(seen) < count:
        raise Unsupported(
            f"TensorFlow {tf.__version__} sees {len(seen)} {plan.device} devices, the plan has "
            f"{count}; next: --framework torch or jax"
        )
    names = tuple(f"/device:{kind}:{index}" for index in range(count))
    if count == 1:
        return TensorFlowReplicas(tf.distribute.get_strategy(), names)
    reduction = tf.distribute.ReductionToOneDevice() if plan.device == "cpu" else None
    strategy = tf.distribute.MirroredStrategy(list(names), cross_device_ops=reduction)
    return TensorFlowReplicas(strategy, names)
