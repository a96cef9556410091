"""nfold makes N devices N-fold faster: it trains data-parallel, measures, and explains.

Public names are imported on first use: importing nfold imports neither torch nor rich.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nfold.ablation import Variant
    from nfold.api import Run, linear_scaling_rule
    from nfold.images import Images
    from nfold.machine import Machine
    from nfold.measurement import Measurement
    from nfold.plan import Plan
    from nfold.training import Training
    from nfold.workload import Workload

__version__ = "0.1.0"
__all__ = [
    "Images",
    "Machine",
    "Measurement",
    "Plan",
    "Run",
    "Training",
    "Variant",
    "Workload",
    "__version__",
    "linear_scaling_rule",
]

_HOMES = {
    "Images": "nfold.images",
    "Machine": "nfold.machine",
    "Measurement": "nfold.measurement",
    "Plan": "nfold.plan",
    "Run": "nfold.api",
    "Training": "nfold.training",
    "Variant": "nfold.ablation",
    "Workload": "nfold.workload",
    "linear_scaling_rule": "nfold.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nfold' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
