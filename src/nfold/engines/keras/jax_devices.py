"""JAX's devices of a plan: opening, names, memory."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import jax

from nfold.core.errors import Unsupported
from nfold.core.machine import peak_resident_bytes
from nfold.core.plan import Plan
from nfold.data.files import cache_root

# JAX's default is tf32 on GPUs that support it
MATMUL_PRECISIONS = {"fp32": "highest", "tf32": "tensorfloat32"}


@dataclass(frozen=True)
class JaxDevices:
    devices: tuple[Any, ...]

    def describe(self) -> str:
        names = sorted({str(device.device_kind) for device in self.devices})
        kind = "cuda" if self.devices[0].platform == "gpu" else "cpu"
        named = ", ".join(f"{kind}:{device.id}" for device in self.devices)
        return named if kind == "cpu" else f"{named} {' / '.join(names)}"

    def memory(self) -> dict[str, int | None]:
        """Return the peak and reserved memory of the device with most; on CPUs the peak RSS."""
        stats = [device.memory_stats() or {} for device in self.devices]
        if not any("peak_bytes_in_use" in found for found in stats):
            return {"peak_memory_bytes": peak_resident_bytes(), "reserved_memory_bytes": None}
        return {
            "peak_memory_bytes": max(found.get("peak_bytes_in_use", 0) for found in stats),
            "reserved_memory_bytes": max(map(reserved_bytes, stats)),
        }


def reserved_bytes(stats: dict[str, int]) -> int:
    """Return the bytes that JAX reserved: its pool if known, otherwise its limit."""
    pool = stats.get("peak_pool_bytes") or stats.get("pool_bytes")
    return pool or stats.get("bytes_limit") or stats.get("bytes_reserved", 0)


def open_devices(plan: Plan) -> JaxDevices:
    """Open the plan's devices; raises Unsupported if JAX does not see them."""
    if jax.config.jax_compilation_cache_dir is None:
        # Per host: a program compiled for one processor may not run on another.
        jax.config.update("jax_compilation_cache_dir", str(cache_root() / "jax" / platform.node()))
    if plan.device == "cpu":
        jax.config.update("jax_num_cpu_devices", plan.devices)
    if plan.precision in MATMUL_PRECISIONS:
        jax.config.update("jax_default_matmul_precision", MATMUL_PRECISIONS[plan.precision])
    seen = jax.devices("gpu" if plan.device == "cuda" else "cpu")
    if len(seen) < (plan.devices or 1):
        raise Unsupported(
            f"JAX {jax.__version__} sees {len(seen)} {plan.device} devices: {list(map(str, seen))}"
        )
    return JaxDevices(tuple(seen[: plan.devices]))
