"""What is left out of a script's steps now, and what ever will be."""

from __future__ import annotations

from nfold.ablation import Ablation
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

    @property
    def exchanges(self) -> bool:
        """Whether the exchange always is the real one."""
        return all(one.exchange == "real" for one in self.ever)

    @property
    def feeds(self) -> bool:
        """Whether the input always is the real one."""
        return all(one.input == "real" for one in self.ever)
