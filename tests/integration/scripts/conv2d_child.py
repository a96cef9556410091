"""conv2d on one back end in one process: prints what it found for every case, as JSON.

The first case opens the devices, two of them; all cases share them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from made import machine
from nfold.core.errors import Mismatch
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.engines.base import Observer, Task, get_framework
from nfold.engines.keras.trainer import run_operation
from nfold.workloads import info
from nfold.workloads.conv2d import array_device, device
from nfold.workloads.conv2d.problem import Array

array_device.ArrayKernelTimer.eviction_bytes = 1024


def run(name: str, workload: str, changes: dict[str, Any]) -> dict[str, Any]:
    """What a report would see of one measurement."""
    known = Workload.parse(workload)
    asked = Plan(framework=name, device="cpu", devices=2, batch=7, steps=2, warmup_steps=1)
    plan = asked.edit(**changes).resolve(machine(cores=2), info("conv2d").defaults)
    reason = get_framework(name).unsupported_reason(known, plan, machine(cores=2))
    if reason:
        return {"unsupported": reason}
    samples = run_operation(Task(workload=known, plan=plan, machine=machine(cores=2)), Observer())
    return {
        "device": samples.device,
        "parts": [[p.name, len(p.seconds), p.images, p.bytes, p.baseline] for p in samples.parts],
        "samples": [window.samples for window in samples.windows],
        "first_step_ms": samples.first_step_ms,
        "peak_memory_bytes": samples.peak_memory_bytes,
    }


def unturned(filters: Array) -> Array:
    """The mistake of a library's correlation taken for a convolution."""
    return filters


def main() -> None:
    """``NAME`` and cases as JSON: [workload, changes of the plan] each; then a planted mistake."""
    name, cases = sys.argv[1], json.loads(sys.argv[2])
    found = [run(name, workload, changes) for workload, changes in cases]
    vars(device)["to_correlation"] = unturned
    try:
        found.append(run(name, "conv2d:size=9", {}))
    except Mismatch as error:
        found.append({"mismatch": str(error)})
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
