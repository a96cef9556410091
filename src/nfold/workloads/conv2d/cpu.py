"""The convolution by torch: how values are kept, and a CPU device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from nfold.plan import Plan
from nfold.workloads.conv2d.check import AnyFloat
from nfold.workloads.conv2d.lane import ConvDevice, HostBuffers
from nfold.workloads.conv2d.problem import Array, ConvProblem, to_correlation

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
MEMORY_FORMATS = {"channels_first": torch.contiguous_format, "channels_last": torch.channels_last}
IMAGE_COPIES = 3
"""Sets of images that take turns, so that no call meets those of the call before."""


@dataclass(frozen=True, kw_only=True)
class TensorFormat:
    """How a precision and a layout keep values: their type, and the order of the axes."""

    dtype: torch.dtype
    memory_format: torch.memory_format

    @classmethod
    def of(cls, plan: Plan) -> TensorFormat:
        """The form that a complete plan asks for."""
        assert plan.precision is not None
        assert plan.layout is not None
        return cls(dtype=DTYPES[plan.precision], memory_format=MEMORY_FORMATS[plan.layout])

    def tensor(self, values: AnyFloat, device: torch.device | None = None) -> Tensor:
        """The values [n, c, h, w] in this form."""
        made = torch.from_numpy(values).to(device=device, dtype=self.dtype)
        return made.contiguous(memory_format=self.memory_format)


@dataclass(frozen=True, kw_only=True)
class TorchHostBuffers(HostBuffers):
    """Images and results [n, c, h, w] of one process."""

    images: Tensor
    results: Tensor
    page_locked: bool = False

    def pinned(self) -> TorchHostBuffers:
        """The same in page-locked memory."""
        images, results = self.images.pin_memory(), self.results.pin_memory()
        return TorchHostBuffers(images=images, results=results, page_locked=True)

    def inputs(self, places: Sequence[int]) -> Array:
        """Some images as float32."""
        return to_float32(self.images, places)

    def outputs(self, places: Sequence[int]) -> Array:
        """Some results as float32."""
        return to_float32(self.results, places)

    def fill_nan(self) -> None:
        """Fill the results with NaN."""
        self.results.fill_(torch.nan)


def to_float32(values: Tensor, places: Sequence[int]) -> Array:
    """Some of the values as float32."""
    found: Array = values[list(places)].float().contiguous().numpy()
    return found


def convolve(images: Tensor, filters: Tensor) -> Tensor:
    """Correlation of the same size, summed over input channels.

    An even filter has no middle. scipy's ``same``, for a convolution, pads one pixel more
    before than after; torch's own would pad it after.
    """
    before, after = filters.shape[-1] // 2, (filters.shape[-1] - 1) // 2
    if before == after:
        return functional.conv2d(images, filters, padding=before)
    return functional.conv2d(functional.pad(images, (before, after) * 2), filters)


class TorchCpuDevice(ConvDevice[TorchHostBuffers]):
    """A CPU device with its share of the host's images, ``place`` of them."""

    def __init__(
        self,
        problem: ConvProblem,
        form: TensorFormat,
        device: torch.device,
        host: TorchHostBuffers,
        image_slice: slice,
    ) -> None:
        self.problem, self.form, self.device, self.image_slice = problem, form, device, image_slice
        with self.work():
            self.input = self.buffer(host.images[image_slice])
            self.result = self.input
            self.set_filters(problem.ones_filter())

    def buffer(self, images: Tensor) -> Tensor:
        """Where the device reads its images."""
        return images

    def set_filters(self, filters: Array) -> None:
        """Convolve with these filters from now on."""
        self.filters = self._on_device(filters)

    def _on_device(self, filters: Array) -> Tensor:
        return self.form.tensor(to_correlation(filters), self.device)

    def compute(self) -> None:
        """Convolve the images."""
        self.result = convolve(self.input, self.filters)

    def pass_through(self) -> None:
        """Take the images themselves for the results."""
        self.result = self.input

    def download(self, host: TorchHostBuffers) -> None:
        """Copy the results into their place in the host's buffer."""
        host.results[self.image_slice].copy_(self.result, non_blocking=True)

    @cached_property
    def _rotation(self) -> Iterator[Tensor]:
        return itertools.cycle([self.input, *(self.input.clone() for _ in range(IMAGE_COPIES - 1))])

    def rotate_images(self) -> None:
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
        return self._on_device(self.problem.mean_filter())

    def iterate(self) -> None:
        """Convolve in a chain, with filters that keep it finite."""
        images = self.input
        for _ in range(self.chain_length):
            images = convolve(images, self._mean)
