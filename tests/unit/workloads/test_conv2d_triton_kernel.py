"""Our kernel against scipy in Triton's interpreter, where Triton is installed.

    TRITON_INTERPRET=1 python -m pytest tests/unit/workloads/test_conv2d_kernel.py

Interpreted and compiled kernels exclude each other in a process, so this needs the variable.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from nfold.workloads.conv2d.problem import TOLERANCES, check_result, scipy_reference, to_correlation
from nfold.workloads.conv2d.torch import DTYPES
from nfold.workloads.conv2d.triton_kernel import (
    MAX_FILTER,
    KernelConfig,
    kernel_configs,
    launcher,
    supports,
)

ODD = (11, 13)
"""Height and width that no tile divides."""


def compare(
    variant: KernelConfig,
    width: int,
    channels: int = 1,
    count: int = 2,
    size: tuple[int, int] = ODD,
    precision: str = "fp32",
    *,
    backwards: bool = False,
) -> None:
    """Random images, random filters; what is not written stays NaN and is found."""
    drawn = np.random.default_rng(0)
    values = drawn.random((count, channels, *size), np.float32)
    taps = (drawn.integers(-8, 9, (channels, channels, width, width)) / 8).astype(np.float32)
    images = torch.from_numpy(values).to(DTYPES[precision])
    filters = torch.from_numpy(to_correlation(taps)).to(DTYPES[precision])
    out = torch.full_like(images, torch.nan)
    assert launcher(variant)(images, filters, out, backwards=backwards) is out
    expected = scipy_reference(images.float().numpy(), taps)
    check_result(out.float().numpy(), expected, range(count), precision)


@pytest.mark.parametrize("width", [3, 5, 10])
@pytest.mark.parametrize("variant", kernel_configs(1), ids=lambda variant: variant.name)
def test_every_variant_is_scipys(variant: KernelConfig, width: int) -> None:
    compare(variant, width)


@pytest.mark.parametrize("variant", kernel_configs(1)[::2], ids=lambda variant: variant.name)
def test_the_order_of_programs_changes_no_result(variant: KernelConfig) -> None:
    compare(variant, 3, count=9, backwards=True)


@pytest.mark.parametrize("width", [3, 5, 10])
def test_ten_channels_are_summed(width: int) -> None:
    compare(KernelConfig(rows=5, outs=5, warps=1), width, channels=10, count=1, size=(7, 11))


def test_every_cut_of_ten_channels() -> None:
    for variant in kernel_configs(10):
        compare(variant, 3, channels=10, count=1, size=(6, 9))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("size", [(10, 10), (20, 3), (1, 40), (40, 1)])
def test_borders_of_images_of_any_form(width: int, size: tuple[int, int]) -> None:
    compare(KernelConfig(rows=10, outs=1, warps=1), width, count=1, size=size)


def test_blocks_that_hold_parts_of_several_images() -> None:
    compare(KernelConfig(rows=5, outs=1, warps=1), 3, count=9, size=(5, 7))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_are_summed_in_fp32(precision: str) -> None:
    compare(KernelConfig(rows=5, outs=1, warps=1), 3, precision=precision)
    assert TOLERANCES[precision] > TOLERANCES["fp32"]


def test_other_orders_of_axes_and_wide_filters_are_left_to_cudnn() -> None:
    images, filters = torch.zeros(2, 10, 8, 8), torch.zeros(10, 10, 3, 3)
    assert supports(images, filters)
    assert not supports(images.contiguous(memory_format=torch.channels_last), filters)
    assert not supports(images, torch.zeros(10, 10, MAX_FILTER + 1, MAX_FILTER + 1))
    one = torch.zeros(2, 1, 8, 8).contiguous(memory_format=torch.channels_last)
    assert supports(one, torch.zeros(1, 1, 3, 3)), "one channel: the same memory"


@pytest.mark.parametrize("channels", [1, 2, 3, 7, 10, 13])
def test_channels_of_a_thread_divide_all(channels: int) -> None:
    found = kernel_configs(channels)
    assert all(channels % variant.outs == 0 for variant in found)
    assert len({variant.name for variant in found}) == len(found) <= 4
