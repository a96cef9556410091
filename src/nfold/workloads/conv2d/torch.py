"""The convolution on torch devices: one process drives one device, or (``dp``) all of them.

Images and results lie on the host in the plan's precision, so 16 bits halve the copies. Every
GPU has a stream of its own. cuDNN's search for the fastest algorithm is in the first call.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional

from nfold.errors import Unsupported
from nfold.plan import Plan
from nfold.workloads.conv2d import unsupported
from nfold.workloads.conv2d.baselines import SCIPY, Baseline
from nfold.workloads.conv2d.check import AnyFloat
from nfold.workloads.conv2d.lane import Host, Lane, Reading
from nfold.workloads.conv2d.problem import Array, Problem
from nfold.workloads.conv2d.process import Process
from nfold.workloads.conv2d.rank import ConvResult, ConvTask, first_call, measure_rank
from nfold.workloads.conv2d.sampling import Clock

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
FORMATS = {"channels_first": torch.contiguous_format, "channels_last": torch.channels_last}
ROTATION = 3
"""Sets of images that take turns, so that no call meets those of the call before."""


TorchTask = ConvTask[torch.device]


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a precision and a layout keep values: their type, and the order of the axes."""

    dtype: torch.dtype
    memory_format: torch.memory_format

    @classmethod
    def of(cls, plan: Plan) -> Form:
        """The form that a complete plan asks for."""
        assert plan.precision is not None
        assert plan.layout is not None
        return cls(dtype=DTYPES[plan.precision], memory_format=FORMATS[plan.layout])

    def tensor(self, values: AnyFloat, device: torch.device | None = None) -> Tensor:
        """The values [n, c, h, w] in this form."""
        made = torch.from_numpy(values).to(device=device, dtype=self.dtype)
        return made.contiguous(memory_format=self.memory_format)


@dataclass(frozen=True, kw_only=True)
class TorchHost(Host):
    """Images and results [n, c, h, w] of one process."""

    images: Tensor
    results: Tensor

    def pinned(self) -> TorchHost:
        """The same in page-locked memory."""
        return TorchHost(images=self.images.pin_memory(), results=self.results.pin_memory())

    def inputs(self, places: Sequence[int]) -> Array:
        """Some images as float32."""
        return _float32(self.images, places)

    def outputs(self, places: Sequence[int]) -> Array:
        """Some results as float32."""
        return _float32(self.results, places)

    def wipe(self) -> None:
        """Fill the results with NaN."""
        self.results.fill_(torch.nan)


def _float32(values: Tensor, places: Sequence[int]) -> Array:
    found: Array = values[list(places)].float().contiguous().numpy()
    return found


def to_correlation(filters: Array) -> Array:
    """The filters whose correlation, which is what torch computes, is these's convolution."""
    return filters[..., ::-1, ::-1].copy()


def convolve(images: Tensor, filters: Tensor) -> Tensor:
    """Correlation of the same size, summed over input channels.

    An even filter has no middle. scipy's ``same``, for a convolution, pads one pixel more
    before than after; torch's own would pad it after.
    """
    before, after = filters.shape[-1] // 2, (filters.shape[-1] - 1) // 2
    if before == after:
        return functional.conv2d(images, filters, padding=before)
    return functional.conv2d(functional.pad(images, (before, after) * 2), filters)


class CpuLane(Lane[TorchHost]):
    """A CPU device with its share of the host's images, ``place`` of them."""

    def __init__(
        self, problem: Problem, form: Form, device: torch.device, host: TorchHost, place: slice
    ) -> None:
        self.problem, self.form, self.device, self.place = problem, form, device, place
        with self.work():
            self.input = self.buffer(host.images[place])
            self.result = self.input
            self.use(problem.ones())

    def buffer(self, images: Tensor) -> Tensor:
        """Where the device reads its images."""
        return images

    def use(self, filters: Array) -> None:
        """Convolve with these filters from now on."""
        self.filters = self._on_device(filters)

    def _on_device(self, filters: Array) -> Tensor:
        return self.form.tensor(to_correlation(filters), self.device)

    def compute(self) -> None:
        """Convolve the images."""
        self.result = convolve(self.input, self.filters)

    def skip(self) -> None:
        """Take the images themselves for the results."""
        self.result = self.input

    def download(self, host: TorchHost) -> None:
        """Copy the results into their place in the host's buffer."""
        host.results[self.place].copy_(self.result, non_blocking=True)

    @cached_property
    def _rotation(self) -> Iterator[Tensor]:
        return itertools.cycle([self.input, *(self.input.clone() for _ in range(ROTATION - 1))])

    def turn(self) -> None:
        """Go on to another copy of the images."""
        self.input = next(self._rotation)

    @cached_property
    def _eviction(self) -> Tensor:
        return torch.empty(self.eviction_bytes, dtype=torch.uint8, device=self.device)

    def evict(self) -> None:
        """Write over the cache."""
        self._eviction.zero_()

    @cached_property
    def _mean(self) -> Tensor:
        return self._on_device(self.problem.mean())

    def iterate(self) -> None:
        """Convolve in a chain, with filters that keep it finite."""
        images = self.input
        for _ in range(self.chain):
            images = convolve(images, self._mean)


class CudaLane(CpuLane):
    """A GPU: its own stream, an input buffer that is allocated once, events for a clock."""

    chain = 50

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def work(self) -> AbstractContextManager[object]:
        """Everything goes to this device and its stream."""
        return torch.cuda.stream(self._stream)

    def finish(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()

    def together(self, seconds: Sequence[float]) -> float:
        """GPUs of one process run at the same time: the slowest decides."""
        return max(seconds)

    def buffer(self, images: Tensor) -> Tensor:
        """Memory of the device, of the same shape and order."""
        self.eviction_bytes = 8 * torch.cuda.get_device_properties(self.device).L2_cache_size
        return torch.empty_like(images, device=self.device)

    def upload(self, host: TorchHost) -> None:
        """Copy this lane's images to the device."""
        self.input.copy_(host.images[self.place], non_blocking=True)

    def timed(self, action: Callable[[], object]) -> Reading:
        """Two events around what is queued; they are read once the stream is finished."""
        start, end = _event(), _event()
        start.record(self._stream)
        action()
        end.record(self._stream)
        return lambda: start.elapsed_time(end) / 1e3

    def peak_memory_bytes(self) -> int:
        """The most that torch's allocator held on this device."""
        return torch.cuda.max_memory_reserved(self.device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def run_parts(task: TorchTask, clock: Clock = time.monotonic) -> ConvResult:
    """Time everything that the workload separates, on one rank.

    ``clock`` is the host's monotonic clock in seconds. Raises Unsupported for a plan that makes
    no sense here and Mismatch where a result is not scipy's.
    """
    reason = unsupported(task.plan)
    if reason is not None:
        raise Unsupported(reason)
    _set_arithmetic(task.plan)
    host, cuda = _host(task), task.devices[0].type == "cuda"
    task.barrier()
    note = _first_call_note(cuda)
    process, first = first_call(partial(_process, task, host, clock), host, note, clock)
    hosts = {"pageable": host, "pinned": host.pinned()} if cuda else {"": host}
    baselines = (*SCIPY, torch_on_cpu(task.cores))
    return measure_rank(task, process, hosts, baselines, first, clock)


def _set_arithmetic(plan: Plan) -> None:
    """cuDNN searches, and uses tf32 only where the plan says so (torch's default is always)."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = plan.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = plan.precision == "tf32"


def _host(task: TorchTask) -> TorchHost:
    own = range(task.shares[0].start, task.shares[-1].stop)
    images = Form.of(task.plan).tensor(task.problem.make_images(own))
    return TorchHost(images=images, results=torch.empty_like(images))


def _first_call_note(cuda: bool) -> str:
    if not cuda:
        return "allocation and computation"
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    begin = "" if started else "CUDA's start, "
    return f"{begin}allocation, cuDNN's start and search, pageable copies, convolution"


def _process(task: TorchTask, host: TorchHost, clock: Clock) -> Process[TorchHost]:
    form = Form.of(task.plan)
    first = task.shares[0].start
    lanes = []
    for device, share in zip(task.devices, task.shares, strict=True):
        kind = CudaLane if device.type == "cuda" else CpuLane
        place = slice(share.start - first, share.stop - first)
        lanes.append(kind(task.problem, form, device, host, place))
    return Process(
        problem=task.problem,
        lanes=lanes,
        shares=task.shares,
        precision=str(task.plan.precision),
        itemsize=form.dtype.itemsize,
        clock=clock,
    )


def torch_on_cpu(threads: int) -> Baseline:
    """torch's float32 convolution on so many cores, without any device."""
    form = Form(dtype=torch.float32, memory_format=torch.contiguous_format)

    def on_cpu(images: AnyFloat, filters: AnyFloat) -> AnyFloat:
        with _threads(threads):
            made = convolve(form.tensor(images), form.tensor(to_correlation(filters)))
            return _float32(made, range(len(images)))

    noun = "thread" if threads == 1 else "threads"
    return Baseline(name=f"torch on the CPU, {threads} {noun}", convolve=on_cpu)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
