"""Measured amounts as a sentence says them."""

from __future__ import annotations

from nfold.stats import Interval


def milliseconds(cost: Interval) -> str:
    """``1.25 ms (1.10 to 1.40)``."""
    return f"{cost.value:.2f} ms{bounds(cost, '{:.2f}')}"


def times(ratio: Interval) -> str:
    """``1.25 × (1.10 to 1.40)``."""
    return f"{ratio.value:.2f} ×{bounds(ratio, '{:.2f}')}"


def bounds(interval: Interval, form: str) -> str:
    """`` (1.10 to 1.40)``, its ends in this form; empty where nobody knows how sure it is."""
    if interval.low is None or interval.high is None or interval.low == interval.high:
        return ""
    return f" ({form.format(interval.low)} to {form.format(interval.high)})"
