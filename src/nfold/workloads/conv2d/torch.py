"""The convolution on torch devices: one process drives one device, or (``dp``) all of them.

Images and results lie on the host in the plan's precision, so 16 bits halve the copies. Every
GPU has streams of its own. The search for the fastest kernel is in the first call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from nfold.core.errors import Unsupported
from nfold.core.plan import Plan
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

TorchTask = ConvTask[torch.device]


def run_parts(task: TorchTask, clock: Clock = time.monotonic) -> ConvResult:
    """Time everything that the workload separates, on one rank.

    ``clock`` is the host's monotonic clock in seconds. Raises Unsupported for a plan that makes
    no sense here and Mismatch where a result is not scipy's.
    """
    reason = unsupported(task.plan)
    if reason is not None:
        raise Unsupported(reason)
    _set_arithmetic(task.plan)
    host, cuda = _host_buffers(task), task.devices[0].type == "cuda"
    task.barrier()
    note = _first_call_note(cuda)
    process, first = first_call(partial(_create_process, task, host, clock), host, note, clock)
    hosts = {"pageable": host, "pinned": host.pinned()} if cuda else {"": host}
    baselines = (*SCIPY_LIBRARIES, torch_on_cpu(task.cores))
    return measure_rank(task, process, hosts, baselines, first, clock)


def _set_arithmetic(plan: Plan) -> None:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = plan.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = plan.precision == "tf32"


def _host_buffers(task: TorchTask) -> TorchHostBuffers:
    own = range(task.device_images[0].start, task.device_images[-1].stop)
    images = TensorFormat.of(task.plan).tensor(task.problem.make_images(own))
    return TorchHostBuffers(images=images, results=torch.empty_like(images))


def _first_call_note(cuda: bool) -> str:
    if not cuda:
        return "allocation and computation"
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    begin = "" if started else "CUDA's start, "
    return (
        f"{begin}allocation, pageable copies, convolution; cuDNN's start and search, and the "
        "compilation and search of our own kernel where Triton is installed"
    )


def _create_process(
    task: TorchTask, host: TorchHostBuffers, clock: Clock
) -> ConvProcess[TorchHostBuffers]:
    form = TensorFormat.of(task.plan)
    first = task.device_images[0].start
    lanes = []
    for device, share in zip(task.devices, task.device_images, strict=True):
        kind = TorchCudaDevice if device.type == "cuda" else TorchCpuDevice
        place = slice(share.start - first, share.stop - first)
        lanes.append(kind(task.problem, form, device, host, place))
    return ConvProcess(
        problem=task.problem,
        devices=lanes,
        device_images=task.device_images,
        precision=str(task.plan.precision),
        itemsize=form.dtype.itemsize,
        clock=clock,
    )


def torch_on_cpu(threads: int) -> LibraryConvolution:
    """torch's float32 convolution on so many cores, without any device."""
    form = TensorFormat(dtype=torch.float32, memory_format=torch.contiguous_format)

    def on_cpu(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
        with _threads(threads):
            made = convolve(form.tensor(images), form.tensor(to_correlation(filters)))
            return to_float32(made, range(len(images)))

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
