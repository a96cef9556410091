"""Plans that are completed by what was measured of the machine: image files and who decodes them.

What is open of ``decode`` and ``workers`` is chosen by rates. They are measured once, by a short
process, and kept: the same plan is completed the same way from then on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nfold import workloads
from nfold.errors import ExtraMissing, NfoldError
from nfold.frameworks.base import Task
from nfold.frameworks.rates import cache_file, read_rates, write_rates
from nfold.frameworks.registry import get_framework
from nfold.lifeline import child_environment
from nfold.machine import Machine
from nfold.plain import deserialize, serialize
from nfold.plan import Plan
from nfold.rates import InputRates, complete_with_rates, depends_on_rates
from nfold.run import attach
from nfold.workload import Workload

MEASUREMENT_TIMEOUT_S = 120.0
"""Starting CUDA and searching kernels take most of it."""
PrepareData = Callable[[Workload, Plan], None]
Notify = Callable[[str], None]


class RatesNotMeasured(NfoldError):
    """The process that measures has ended without an answer."""


@dataclass(frozen=True, kw_only=True)
class PlanCompleter:
    """Completes plans on a machine.

    ``prepare`` lets the files be there, ``tell`` is told what takes a while. ``measures`` may be
    False: then only what was measured before is used. ``folder`` is looked into for files first.
    """

    machine: Machine
    prepare: PrepareData
    notify: Notify
    may_measure: bool = True
    data_folder: Path | None = None

    def __call__(self, workload: Workload, asked: Plan) -> Plan:
        """The complete plan; in a job that somebody else launched without any measurement.

        Its ranks would have to find the same rates.
        """
        by_rule = asked.resolve(self.machine, workloads.info(workload.name).defaults)
        if attach.in_external_job() or not self._matters(workload, asked, by_rule):
            return by_rule
        if self.data_folder is not None:
            os.environ["NFOLD_DATA"] = str(self.data_folder.resolve())
        file = cache_file(workload, by_rule, self.machine)
        rates = read_rates(file) or (
            self._measured(workload, by_rule, file) if self.may_measure else None
        )
        return complete_with_rates(asked, by_rule, rates)

    def _matters(self, workload: Workload, asked: Plan, by_rule: Plan) -> bool:
        """Whether rates decide anything of a plan that can run."""
        if not depends_on_rates(asked, by_rule):
            return False
        try:
            return not get_framework(by_rule.framework).unsupported_reason(
                workload, by_rule, self.machine
            )
        except ExtraMissing:
            return False

    def _measured(self, workload: Workload, plan: Plan, file: Path) -> InputRates | None:
        """Measure and keep; None, which is told, where that fails."""
        self.prepare(workload, plan)
        self.notify(f"measuring once what this machine does with the image files of {workload}")
        try:
            rates = measure_rates(Task(workload=workload, plan=plan, machine=self.machine))
        except RatesNotMeasured as error:
            self.notify(f"{error}; {plan.workers} workers and decode cpu are taken unmeasured")
            return None
        write_rates(file, rates)
        return rates


def measure_rates(task: Task) -> InputRates:
    """The rates of a task, measured in a process of their own; NotMeasured says what went wrong."""
    command = (sys.executable, "-P", "-m", "nfold.frameworks.torch.rates")
    try:
        done = subprocess.run(
            command,
            env=child_environment(),
            input=json.dumps(serialize(task)),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=MEASUREMENT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RatesNotMeasured(
            f"no rates of image files within {MEASUREMENT_TIMEOUT_S:.0f} s"
        ) from None
    last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    if done.returncode != 0:
        raise RatesNotMeasured(f"the process that measures ended with {done.returncode}: {last[0]}")
    said = json.loads(done.stdout)
    if "error" in said:
        raise RatesNotMeasured(said["error"])
    return deserialize(InputRates, said)
