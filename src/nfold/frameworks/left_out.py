"""What is left out of a rank's steps now, and what ever will be."""

from __future__ import annotations

from nfold.ablation import NO_INTERVENTIONS, Variant
from nfold.frameworks.base import Task


class ActiveVariant:
    """``now`` is constant in a run without turns; with them it is what the process is held to
    until the warm-up is over, and then that of the turn.
    """

    def __init__(self, task: Task) -> None:
        self.current = task.variant
        self.interleaved = task.interleaved_variants

    @property
    def all_variants(self) -> tuple[Variant, ...]:
        """Everything that is left out at some time."""
        return self.interleaved or (self.current,)

    def is_baseline(self, field: str) -> bool:
        """Whether what this field of an Ablation is about is in place all the time."""
        return all(
            getattr(one, field) == getattr(NO_INTERVENTIONS, field) for one in self.all_variants
        )
