"""Where the rates of image files that were measured on this machine are kept, and what they say.

Kept once and for all, so that a plan that they complete stays the same plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path

from nfold.core.input_rates import InputRates, complete_with_rates, depends_on_rates
from nfold.core.machine import Machine
from nfold.core.plan import Plan
from nfold.core.serialization import deserialize, serialize
from nfold.core.workload import Workload
from nfold.data.files import cache_root
from nfold.engines.base import Task

KEY_FIELDS = ("augment", "precision", "layout", "step")
"""What rates depend on of a complete plan; not its devices: all cores are busy in any case."""
NOTE_KIND = "input_rates"


def cache_file(workload: Workload, plan: Plan, machine: Machine) -> Path:
    """Where the rates of a complete plan are kept; of other photographs elsewhere."""
    facts = [machine.id, str(workload), os.environ.get("NFOLD_DATA", "")]
    facts += [str(getattr(plan, name)) for name in KEY_FIELDS]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_root() / "rates" / f"{digest}.json"


def read_rates(file: Path) -> InputRates | None:
    """The rates in a file; None where there is none, or none that can be read."""
    try:
        return deserialize(InputRates, json.loads(file.read_text()))
    except (OSError, ValueError):
        return None


def write_rates(file: Path, rates: InputRates) -> None:
    """Write them, aside and then renamed; a cache that cannot be written keeps nothing."""
    aside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(serialize(rates)))
        os.rename(aside, file)
    except OSError:
        aside.unlink(missing_ok=True)


def rate_notes(task: Task) -> tuple[tuple[str, str], ...]:
    """The rates as (kind, text), where the task's plan is what they choose."""
    plan = task.plan
    open_, by_rule = plan.edit(decode=None, workers=None), plan.edit(decode="cpu")
    if not depends_on_rates(open_, by_rule):
        return ()
    rates = read_rates(cache_file(task.workload, plan, task.machine))
    if rates is None or complete_with_rates(open_, by_rule, rates) != plan:
        return ()
    return ((NOTE_KIND, rates.describe(plan)),)
