"""What an experiment takes away from a plan to learn its cost.

A type of its own on purpose: a plan can ship, an ablation never can. No ablation is defined
yet; a measurement already has the field, so that a store written today stays readable.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """The parts of a run that an experiment leaves out. The empty one leaves out nothing."""

    def to_dict(self) -> dict[str, object]:
        """The ablation as plain JSON values."""
        return {}

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> Ablation:
        """The ablation that ``to_dict`` wrote; an unknown entry is refused, never ignored."""
        if values:
            raise ValueError(f"unknown ablation entries {sorted(values)}; this nfold knows none")
        return cls()
