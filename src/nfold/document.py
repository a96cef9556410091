"""The versioned JSON object that commands print: machine, measurements, comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nfold.comparison import compare_all
from nfold.measurement import Measurement
from nfold.summary import JSON_SCHEMA_VERSION, group_cells, measurement_json


def measurements_document(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """``{"schema", "machine", "machines", "measurements", "comparisons"}`` as plain JSON values.

    ``machine`` is the newest measurement's, None without any; ``machines`` holds every one by
    its id, and each measurement names its own. What is not a number (a diverged loss) is null,
    because JSON has no NaN.
    """
    found = {
        "schema": JSON_SCHEMA_VERSION,
        "machine": measurements[-1].machine.to_dict() if measurements else None,
        "machines": {m.machine.id: m.machine.to_dict() for m in measurements},
        "measurements": [{**measurement_json(m), "machine": m.machine.id} for m in measurements],
        "comparisons": [one.to_json() for one in compare_all(group_cells(measurements))],
    }
    clean: dict[str, Any] = _finite(found)
    return clean


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
