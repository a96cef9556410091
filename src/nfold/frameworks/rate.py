"""The course of a learning rate over a training, as a part of its peak."""

from __future__ import annotations

WARMUP_FRACTION = 0.2
"""The part of the steps in which the rate rises to its peak."""


def one_cycle(progress: float) -> float:
    """The part of the peak at a place between 0, the first step, and 1, the end.

    L. Smith and N. Topin, Super-Convergence (arXiv:1708.07120, 2017): linearly up, then down to
    nothing.
    """
    return (
        progress / WARMUP_FRACTION
        if progress < WARMUP_FRACTION
        else (1 - progress) / (1 - WARMUP_FRACTION)
    )
