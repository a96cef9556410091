"""Complete plans and prepare data before anything runs.

How image files are decoded (``decode``, ``workers``) is chosen by measured rates. A short process
measures them once per machine and stores them, so that the same plan is always completed the same
way.
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
from nfold.cli.render import print_note
from nfold.core.errors import ExtraMissing, NfoldError
from nfold.core.input_rates import InputRates, complete_with_rates, depends_on_rates
from nfold.core.machine import Machine
from nfold.core.plan import Plan
from nfold.core.serialization import deserialize, serialize
from nfold.core.workload import Workload
from nfold.engines.base import Task, get_framework
from nfold.engines.torch.input.rate_cache import cache_file, read_rates, write_rates
from nfold.launch import workload_run

MEASUREMENT_TIMEOUT_S = 120.0  # starting CUDA and searching kernels take most of it
PrepareData = Callable[[Workload, Plan], None]
Notify = Callable[[str], None]


class RatesNotMeasured(NfoldError):
    """The process that measures rates ended without a result."""


@dataclass(frozen=True, kw_only=True)
class PlanCompleter:
    """Completes plans on a machine.

    ``prepare`` provides the data files, ``notify`` prints a line. Without ``may_measure`` only
    stored rates are used.
    """

    machine: Machine
    prepare: PrepareData
    notify: Notify
    may_measure: bool = True
    data_folder: Path | None = None

    def __call__(self, workload: Workload, plan: Plan) -> Plan:
        """Return the complete plan.

        Ranks of a job that nfold did not launch measure nothing: each would get other rates.
        """
        by_rule = plan.resolve(self.machine, workloads.info(workload.name).defaults)
        if workload_run.in_external_job() or not self._needs_rates(workload, plan, by_rule):
            return by_rule
        if self.data_folder is not None:
            os.environ["NFOLD_DATA"] = str(self.data_folder.resolve())
        file = cache_file(workload, by_rule, self.machine)
        rates = read_rates(file)
        if rates is None and self.may_measure:
            rates = self._measure(workload, by_rule, file)
        return complete_with_rates(plan, by_rule, rates)

    def _needs_rates(self, workload: Workload, plan: Plan, by_rule: Plan) -> bool:
        if not depends_on_rates(plan, by_rule):
            return False
        framework = get_framework(by_rule.framework)
        try:
            return not framework.unsupported_reason(workload, by_rule, self.machine)
        except ExtraMissing:
            return False

    def _measure(self, workload: Workload, plan: Plan, file: Path) -> InputRates | None:
        self.prepare(workload, plan)
        self.notify(f"measuring how fast this machine decodes the images of {workload} (once)")
        try:
            rates = measure_rates(Task(workload=workload, plan=plan, machine=self.machine))
        except RatesNotMeasured as error:
            self.notify(f"{error}; using {plan.workers} workers and decode cpu, not measured")
            return None
        write_rates(file, rates)
        return rates


def measure_rates(task: Task) -> InputRates:
    """Measure the input rates of a task in a process; raises RatesNotMeasured with the reason."""
    command = (sys.executable, "-P", "-m", "nfold.engines.torch.input.rate_benchmark")
    try:
        done = subprocess.run(
            command,
            input=json.dumps(serialize(task)),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=MEASUREMENT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RatesNotMeasured(
            f"the input rates were not measured within {MEASUREMENT_TIMEOUT_S:.0f} s"
        ) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no error message"])[-1]
        raise RatesNotMeasured(
            f"measuring the input rates exited with code {done.returncode}: {last}"
        )
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise RatesNotMeasured(answer["error"])
    return deserialize(InputRates, answer)


def prepare_data(workload: Workload, plan: Plan, folder: Path | None) -> None:
    """Find, verify and decode the data that a workload reads, first in ``folder``.

    Raises DataMissing and DataCorrupt.
    """
    info = workloads.info(workload.name)
    if info.defaults.encoded:
        parameters = workloads.parameters(workload)
        data.prepare_photographs(
            folder,
            samples=parameters["samples"],
            classes=parameters["classes"],
            skip_bad=plan.bad_images == "skip",
            decode=plan.cache == "decoded" or plan.input == "resident",
        )
    elif info.dataset is not None:
        data.prepare(info.dataset, folder)


def epoch_samples(workload: Workload) -> int | None:
    """Return the training samples of an epoch, or None if only a run can tell."""
    if workload.script:
        return None
    info, parameters = workloads.info(workload.name), workloads.parameters(workload)
    available = data.photograph_count() if info.defaults.encoded else info.training_samples
    limits = filter(None, (available, parameters.get("samples", 0)))
    return min(limits, default=0) * parameters.get("repeat", 1) or None


def build_plan_completer(
    machine: Machine, folder: Path | None, *, measures: bool = True
) -> PlanCompleter:
    """Return the completer of a command; without ``measures`` it uses stored rates only."""
    return PlanCompleter(
        machine=machine,
        prepare=partial(prepare_data, folder=folder),
        notify=print_note,
        may_measure=measures,
        data_folder=folder,
    )
