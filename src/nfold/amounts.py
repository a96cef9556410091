"""Measured amounts as a sentence says them."""

from __future__ import annotations

from nfold.stats import Interval


def format_milliseconds_interval(cost: Interval) -> str:
    """``1.25 ms (1.10 to 1.40)``."""
    return f"{cost.value:.2f} ms{format_parenthesized_range(cost, '{:.2f}')}"


def format_ratio_interval(ratio: Interval) -> str:
    """``1.25 × (1.10 to 1.40)``."""
    return f"{ratio.value:.2f} ×{format_parenthesized_range(ratio, '{:.2f}')}"


def format_parenthesized_range(interval: Interval, form: str) -> str:
    """`` (1.10 to 1.40)``, its ends in this form; empty where nobody knows how sure it is."""
    if interval.low is None or interval.high is None or interval.low == interval.high:
        return ""
    return f" ({form.format(interval.low)} to {form.format(interval.high)})"
