"""Where the rates of image files that were measured on this machine are kept, and what they say.

Kept once and for all, so that a plan that they complete stays the same plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path

from nfold.data.find import cache_root
from nfold.frameworks.base import Task
from nfold.machine import Machine
from nfold.plain import from_plain, to_plain
from nfold.plan import Plan
from nfold.rates import InputRates, fitted, measurable
from nfold.workload import Workload

FACTS = ("augment", "precision", "layout", "step")
"""What rates depend on of a complete plan; not its devices: all cores are busy in any case."""
KIND = "input_rates"


def file_of(workload: Workload, plan: Plan, machine: Machine) -> Path:
    """Where the rates of a complete plan are kept; of other photographs elsewhere."""
    facts = [machine.id, str(workload), os.environ.get("NFOLD_DATA", "")]
    facts += [str(getattr(plan, name)) for name in FACTS]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_root() / "rates" / f"{digest}.json"


def kept(file: Path) -> InputRates | None:
    """The rates in a file; None where there is none, or none that can be read."""
    try:
        return from_plain(InputRates, json.loads(file.read_text()))
    except (OSError, ValueError):
        return None


def keep(file: Path, rates: InputRates) -> None:
    """Write them, aside and then renamed; a cache that cannot be written keeps nothing."""
    aside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(to_plain(rates)))
        os.rename(aside, file)
    except OSError:
        aside.unlink(missing_ok=True)


def rate_notes(task: Task) -> tuple[tuple[str, str], ...]:
    """The rates as (kind, text), where the task's plan is what they choose."""
    plan = task.plan
    open_, by_rule = plan.edit(decode=None, workers=None), plan.edit(decode="cpu")
    if not measurable(open_, by_rule):
        return ()
    rates = kept(file_of(task.workload, plan, task.machine))
    if rates is None or fitted(open_, by_rule, rates) != plan:
        return ()
    return ((KIND, rates.told(plan)),)
