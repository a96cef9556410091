"""What is left out of a rank's steps now, and what ever will be."""

from __future__ import annotations

from nfold.ablation import NOTHING, Ablation
from nfold.frameworks.base import Task


class LeftOut:
    """``now`` is constant in a run without turns; with them it is what the process is held to
    until the warm-up is over, and then that of the turn.
    """

    def __init__(self, task: Task) -> None:
        self.now = task.left_out
        self.turns = task.turns

    @property
    def ever(self) -> tuple[Ablation, ...]:
        """Everything that is left out at some time."""
        return self.turns or (self.now,)

    def never(self, name: str) -> bool:
        """Whether what this field of an Ablation is about is in place all the time."""
        return all(getattr(one, name) == getattr(NOTHING, name) for one in self.ever)
