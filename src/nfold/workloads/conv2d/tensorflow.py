"""The convolution on TensorFlow devices in one process.

Each device has its own program, because XLA compiles for one device. Devices are names, for example
``/device:CPU:0``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from nfold.workloads.conv2d.array_device import ArrayDevice, run_devices, same_padding
from nfold.workloads.conv2d.problem import Array
from nfold.workloads.conv2d.problem import ConvTask as Task
from nfold.workloads.conv2d.process import Clock, ConvResult

Tensor = Any


def run_parts(
    task: Task, peak_memory_bytes: Callable[[], int], clock: Clock = time.monotonic
) -> ConvResult:
    return run_devices(task, TensorFlowConvDevice, peak_memory_bytes, clock)


class TensorFlowConvDevice(ArrayDevice):
    @property
    def method(self) -> str:
        return f"tf.nn.conv2d, {self.plan.step}, by the host's clock"

    def work(self) -> AbstractContextManager[object]:
        device: AbstractContextManager[object] = tf.device(self.device)
        return device

    def create_input(self, images: Array) -> Tensor:
        return tf.constant(images)

    def to_host(self, value: Tensor) -> Array:
        return np.asarray(value)

    def convolve(self, images: Tensor, filters: Tensor) -> Tensor:
        pads, none = same_padding(filters.shape[0]), (0, 0)
        last = self.plan.layout == "channels_last"
        return tf.nn.conv2d(
            images,
            filters,
            strides=1,
            padding=[none, pads, pads, none] if last else [none, none, pads, pads],
            data_format="NHWC" if last else "NCHW",
        )

    def compile(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if self.plan.step == "eager":
            return function
        compiled = self.plan.step == "compiled"
        graph: Callable[..., Tensor] = tf.function(function, autograph=False, jit_compile=compiled)
        return graph

    def wait(self, values: Sequence[Tensor]) -> None:
        del values
        tf.test.experimental.sync_devices()
