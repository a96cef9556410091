"""Numbers and arrays of resamples, which statistics treat alike."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Samples: TypeAlias = float | NDArray[np.float64]
"""One value, or one per resample."""


def smallest(values: Iterable[Samples]) -> Samples:
    """Return the smallest of several values, by resample."""
    return reduce(np.minimum, values)


def ratio(numerator: Samples, denominator: Samples, otherwise: float = 0.0) -> Samples:
    """Return a ratio by resample; ``otherwise`` where the denominator is not positive."""
    divisor = np.where(denominator > 0, denominator, 1.0)
    return np.where(denominator > 0, numerator / divisor, otherwise)
