"""The convolution on PyTorch devices: one process drives one device, or (``dp``) all devices.

Images and results on the host have the plan's precision. The first call includes the search for the
fastest kernel.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nfold.core.errors import Unsupported
from nfold.workloads.conv2d import unsupported
from nfold.workloads.conv2d.problem import AnyFloat, to_correlation
from nfold.workloads.conv2d.process import (
    SCIPY_LIBRARIES,
    ConvProcess,
    ConvResult,
    ConvTask,
    LibraryConvolution,
    first_call,
    measure_rank,
)
from nfold.workloads.conv2d.timing import Clock
from nfold.workloads.conv2d.torch_devices import (
    TensorFormat,
    TorchCpuDevice,
    TorchCudaDevice,
    TorchHostBuffers,
    convolve,
    to_float32,
)

Task = ConvTask[torch.device]


def run_parts(task: Task, clock: Clock = time.monotonic) -> ConvResult:
    """Time every part on one rank; ``clock`` is the host's monotonic clock in seconds.

    Raises Unsupported for an impossible plan and Mismatch for a result that differs from scipy's.
    """
    reason = unsupported(task.plan)
    if reason is not None:
        raise Unsupported(reason)
    tensor_format, cuda = TensorFormat.of(task.plan), task.devices[0].type == "cuda"
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = task.plan.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = task.plan.precision == "tf32"
    first_image, stop = task.device_images[0].start, task.device_images[-1].stop
    images = tensor_format.tensor(task.problem.make_images(range(first_image, stop)))
    host = TorchHostBuffers(images=images, results=torch.empty_like(images))

    def create_process() -> ConvProcess[TorchHostBuffers]:
        device_class = TorchCudaDevice if cuda else TorchCpuDevice
        devices = [
            device_class(
                task.problem,
                tensor_format,
                device,
                host,
                slice(share.start - first_image, share.stop - first_image),
            )
            for device, share in zip(task.devices, task.device_images, strict=True)
        ]
        return ConvProcess(
            problem=task.problem,
            devices=devices,
            device_images=task.device_images,
            precision=str(task.plan.precision),
            itemsize=tensor_format.dtype.itemsize,
            clock=clock,
        )

    task.barrier()
    process, first = first_call(create_process, host, _first_call_note(cuda), clock)
    hosts = {"pageable": host, "pinned": host.pinned()} if cuda else {"": host}
    libraries = (*SCIPY_LIBRARIES, torch_on_cpu(task.cores))
    return measure_rank(task, process, hosts, libraries, first, clock)


def _first_call_note(cuda: bool) -> str:
    if not cuda:
        return "allocation and computation"
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return (
        f"{'' if initialized else 'CUDA initialization, '}allocation, pageable copies, "
        "convolution; cuDNN initialization and search; with Triton, kernel compilation and search"
    )


def torch_on_cpu(threads: int) -> LibraryConvolution:
    """Return torch's float32 convolution on ``threads`` cores."""
    tensor_format = TensorFormat(dtype=torch.float32, memory_format=torch.contiguous_format)

    def on_cpu(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
        with _threads(threads):
            filters = to_correlation(filters)
            result = convolve(tensor_format.tensor(images), tensor_format.tensor(filters))
            return to_float32(result, range(len(images)))

    noun = "thread" if threads == 1 else "threads"
    return LibraryConvolution(name=f"torch on the CPU, {threads} {noun}", convolve=on_cpu)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
