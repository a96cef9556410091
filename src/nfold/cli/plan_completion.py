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
from functools import partial
from pathlib import Path

from nfold import data, workloads
from nfold.core.errors import ExtraMissing, NfoldError
from nfold.core.format import terminal_safe
from nfold.core.input_rates import InputRates, complete_with_rates, depends_on_rates
from nfold.core.machine import Machine
from nfold.core.parent_death import child_environment
from nfold.core.plan import Plan
from nfold.core.serialization import deserialize, serialize
from nfold.core.workload import Workload
from nfold.engines.base import Task, get_framework
from nfold.engines.torch.input.rate_cache import cache_file, read_rates, write_rates
from nfold.launch import workload_run

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
        if workload_run.in_external_job() or not self._matters(workload, asked, by_rule):
            return by_rule
        if self.data_folder is not None:
            os.environ["NFOLD_DATA"] = str(self.data_folder.resolve())
        file = cache_file(workload, by_rule, self.machine)
        rates = read_rates(file) or (
            self._measured(workload, by_rule, file) if self.may_measure else None
        )
        return complete_with_rates(asked, by_rule, rates)

    def _matters(self, workload: Workload, asked: Plan, by_rule: Plan) -> bool:
        if not depends_on_rates(asked, by_rule):
            return False
        try:
            return not get_framework(by_rule.framework).unsupported_reason(
                workload, by_rule, self.machine
            )
        except ExtraMissing:
            return False

    def _measured(self, workload: Workload, plan: Plan, file: Path) -> InputRates | None:
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
    command = (sys.executable, "-P", "-m", "nfold.engines.torch.input_benchmark")
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


# Data found, verified and decoded before anything runs: missing data is one error then.
#
# And plans completed: what is measured of the machine for that is measured of these data.


def prepare_data(workload: Workload, plan: Plan, folder: Path | None) -> None:
    """Prepare what a workload reads under a plan; ``folder`` is looked into first."""
    known = workloads.info(workload.name)
    if known.defaults.encoded:
        chosen = workloads.parameters(workload)
        data.prepare_photographs(
            folder,
            samples=chosen["samples"],
            classes=chosen["classes"],
            skip_bad=plan.bad_images == "skip",
            decode=plan.cache == "decoded" or plan.input == "resident",
        )
    elif known.dataset is not None:
        data.prepare(known.dataset, folder)


def epoch_samples(workload: Workload) -> int | None:
    """The training samples of an epoch, those of photographs as they were prepared.

    None where nobody knows before it was run.
    """
    if workload.script:
        return None
    known, chosen = workloads.info(workload.name), workloads.parameters(workload)
    there = data.photograph_count() if known.defaults.encoded else known.training_samples
    limits = filter(None, (there, chosen.get("samples", 0)))
    return min(limits, default=0) * chosen.get("repeat", 1) or None


def build_plan_completer(
    machine: Machine, folder: Path | None, *, measures: bool = True
) -> PlanCompleter:
    """What completes plans; not ``measures``: by what was measured before, if anything was."""
    return PlanCompleter(
        machine=machine,
        prepare=partial(prepare_data, folder=folder),
        notify=_tell,
        may_measure=measures,
        data_folder=folder,
    )


def _tell(text: str) -> None:
    sys.stderr.write(f"nfold: {terminal_safe(text)}\n")
