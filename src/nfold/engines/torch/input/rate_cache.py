"""Cached rates of image files on this machine. They are kept, so that a completed plan stays the same."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from nfold.core.input_rates import InputRates, complete_with_rates, depends_on_rates
from nfold.core.machine import Machine
from nfold.core.plan import Plan
from nfold.core.serialization import deserialize, replace_file, serialize
from nfold.core.workload import Workload
from nfold.data.files import cache_root
from nfold.engines.base import Task

# Fields of a complete plan that rates depend on. Not the devices: all cores are always busy.
KEY_FIELDS = ("augment", "precision", "layout", "step")
NOTE_KIND = "input_rates"


def cache_file(workload: Workload, plan: Plan, machine: Machine) -> Path:
    """Return the file of the rates of a complete plan and its photographs."""
    facts = [machine.id, str(workload), os.environ.get("NFOLD_DATA", "")]
    facts += [str(getattr(plan, name)) for name in KEY_FIELDS]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_root() / "rates" / f"{digest}.json"


def read_rates(file: Path) -> InputRates | None:
    try:
        return deserialize(InputRates, json.loads(file.read_text()))
    except (OSError, ValueError):
        return None


def write_rates(file: Path, rates: InputRates) -> None:
    """Write the rates. An unwritable cache is ignored."""
    with suppress(OSError), replace_file(file) as temporary:
        temporary.write_text(json.dumps(serialize(rates)))


def rate_notes(task: Task) -> tuple[tuple[str, str], ...]:
    """Return the rates as (kind, text), if they chose fields of the task's plan."""
    plan = task.plan
    open_, by_rule = plan.edit(decode=None, workers=None), plan.edit(decode="cpu")
    if not depends_on_rates(open_, by_rule):
        return ()
    rates = read_rates(cache_file(task.workload, plan, task.machine))
    if rates is None or complete_with_rates(open_, by_rule, rates) != plan:
        return ()
    return ((NOTE_KIND, rates.describe(plan)),)
