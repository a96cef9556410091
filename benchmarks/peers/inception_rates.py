"""What decodes photographs, measured alone: cores, all at work, and nvJPEG on one GPU.

In a process of its own, because workers are forks and CUDA must not be there yet.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from nfold import workloads
from nfold.core.child_process import die_with_parent
from nfold.core.input_rates import ImageRate
from nfold.core.plan import Plan
from nfold.core.serialization import deserialize, serialize
from nfold.core.workload import Workload
from nfold.data import photographs
from nfold.engines.base import Task
from nfold.telemetry.machine_inspection import inspect_machine

AT_ONCE = 128


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of a core that decodes for the device, of one that also distorts, and of nvJPEG."""

    decodes: ImageRate
    finishes: ImageRate
    nvjpeg: ImageRate | None


def rates_alone(workload: str, devices: int, device: str) -> Measured | None:
    """Measured in another process; None, with the reason printed, where it fails."""
    command = (sys.executable, __file__, workload, str(devices), device)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    except subprocess.SubprocessError as error:
        print(f"nothing measured alone: {error}", getattr(error, "stderr", ""), file=sys.stderr)
        return None
    return deserialize(Measured, json.loads(done.stdout.splitlines()[-1]))


def main(workload: str, devices: int, device: str) -> Measured:
    from nfold.engines.torch.input.image_files import ImageBatches
    from nfold.engines.torch.input.rate_benchmark import measure_decoder, measure_worker

    asked, machine = Workload.parse(workload), inspect_machine()
    size = workloads.parameters(asked)["size"]
    part = photographs.load().train
    number = max(1, machine.cores // devices - 1) * devices
    tasks = {}
    for place in ("device", "cpu"):
        plan = Plan(device=device, devices=devices, augment=place, workers=number)
        complete = plan.resolve(machine, workloads.info(asked.name).defaults)
        tasks[place] = Task(workload=asked, plan=complete, machine=machine)
    decodes, finishes = (
        measure_worker(ImageBatches(part, task, size), len(part), number) for task in tasks.values()
    )
    found = measure_decoder(part, tasks["device"], size, AT_ONCE) if device == "cuda" else None
    return Measured(decodes=decodes, finishes=finishes, nvjpeg=found)


if __name__ == "__main__":
    die_with_parent()
    print(json.dumps(serialize(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))))
