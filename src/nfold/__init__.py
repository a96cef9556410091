"""nfold makes N devices N-fold faster: it trains data-parallel, measures and explains.

Public names are imported on first use, so that importing nfold imports neither torch nor rich.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nfold.api import Run, linear_scaling_rule
    from nfold.core.image_augmentation import Images
    from nfold.core.machine import Machine
    from nfold.core.measurement import Measurement
    from nfold.core.plan import Plan
    from nfold.core.variant import Variant
    from nfold.core.workload import Training, Workload
    from nfold.engines.marks import batches, mark_step

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
    "batches",
    "linear_scaling_rule",
    "mark_step",
]

_HOMES = {
    "Images": "nfold.core.image_augmentation",
    "Machine": "nfold.core.machine",
    "Measurement": "nfold.core.measurement",
    "Plan": "nfold.core.plan",
    "Run": "nfold.api",
    "Training": "nfold.core.workload",
    "Variant": "nfold.core.variant",
    "Workload": "nfold.core.workload",
    "batches": "nfold.engines.marks",
    "linear_scaling_rule": "nfold.api",
    "mark_step": "nfold.engines.marks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nfold' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
