"""JAX's devices of a plan: how they are opened, what they are called, what they hold."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import jax

from nfold.core.errors import Unsupported
from nfold.core.machine import peak_resident_bytes
from nfold.core.plan import Plan
from nfold.data.files import cache_root

# How float32 products are computed; by itself JAX takes tf32 on GPUs that have it
MATMUL_PRECISIONS = {"fp32": "highest", "tf32": "tensorfloat32"}


@dataclass(frozen=True)
class JaxDevices:
    """The plan's, in order."""

    devices: tuple[Any, ...]

    def describe(self) -> str:
        """The devices and their kind."""
        names = sorted({str(device.device_kind) for device in self.devices})
        kind = "cuda" if self.devices[0].platform == "gpu" else "cpu"
        named = ", ".join(f"{kind}:{device.id}" for device in self.devices)
        return named if kind == "cpu" else f"{named} {' / '.join(names)}"

    def memory(self) -> dict[str, int | None]:
        """Of the fullest device what was in use, and what JAX took; on CPUs the peak RSS."""
        stats = [device.memory_stats() or {} for device in self.devices]
        if not any("peak_bytes_in_use" in found for found in stats):
            return {"peak_memory_bytes": peak_resident_bytes(), "reserved_memory_bytes": None}
        return {
            "peak_memory_bytes": max(found.get("peak_bytes_in_use", 0) for found in stats),
            "reserved_memory_bytes": max(map(reserved_bytes, stats)),
        }


def reserved_bytes(stats: dict[str, int]) -> int:
    """What JAX took from a device: its pool, as far as it says, else the limit it set itself."""
    pool = stats.get("peak_pool_bytes") or stats.get("pool_bytes")
    return pool or stats.get("bytes_limit") or stats.get("bytes_reserved", 0)


def open_jax_devices(plan: Plan) -> JaxDevices:
    """The plan's devices, opened; raises Unsupported where JAX does not see them."""
    _enable_compilation_cache()
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


def _enable_compilation_cache() -> None:
    """Let programs of earlier processes be found again, unless the environment says where.

    As TorchInductor does: the first step of a repeat is short. Of each host apart: what was
    compiled for one processor may not run on another.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_root() / "jax" / platform.node()))
