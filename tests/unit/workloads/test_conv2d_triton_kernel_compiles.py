"""Our kernel compiled for a GPU of compute capability 9.0, which needs Triton but no GPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nfold.workloads.conv2d.triton_kernel import KernelConfig

triton = pytest.importorskip("triton")
kernel = pytest.importorskip("nfold.workloads.conv2d.triton_kernel")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)


def compiled(variant: KernelConfig, channels: int, width: int, kind: str) -> str:
    """The PTX for images of 100 × 100."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {
        "height": 100,
        "width": 100,
        "channels": channels,
        "outs": channels,
        "size": width,
        "rows": variant.rows,
        "own": variant.outs,
        "block": kernel.WARP * variant.warps,
        "unroll": width <= kernel.MAX_UNROLLED,
        "backwards": False,
    }
    pointers = dict.fromkeys(("images", "filters", "out"), kind)
    types = {**pointers, "columns": "i32", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel.correlate, types, constexprs=constants)
    target = GPUTarget("cuda", 90, 32)
    made = triton.compile(source, target=target, options={"num_warps": variant.warps})
    return str(made.asm["ptx"])


@pytest.mark.parametrize(
    ("channels", "width", "kind"),
    [(1, 3, "*fp32"), (1, 10, "*fp32"), (10, 3, "*fp32"), (1, 3, "*bf16"), (1, 5, "*fp16")],
)
def test_a_thread_loads_a_column_once_and_multiplies_for_every_sum(
    channels: int, width: int, kind: str
) -> None:
    """The counts are those of one filter column, or of all of them where they are unrolled."""
    variant = kernel.kernel_configs(channels)[0]
    ptx = compiled(variant, channels, width, kind)
    columns = width if width <= kernel.MAX_UNROLLED else 1
    values = variant.rows + width - 1
    taps = variant.outs * width
    assert ptx.count("ld.global") == columns * (values + taps)
    assert ptx.count("fma.rn.f32") == columns * width * variant.rows * variant.outs
    assert "tf32" not in ptx
