"""Which optimizer's steps are the steps of a training that has several."""

from __future__ import annotations

from typing import Any


class Boundary:
    """The optimizer that steps least often; of those that step equally often, the last in turn.

    Found while the training warms up, kept from ``settle`` on.
    """

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._settled: int | None = None
        self.optimizers: list[Any] = []

    @property
    def chosen(self) -> int:
        """Its place in ``optimizers``, which are in the order of their first steps."""
        counts = list(self._steps.values())
        return max(range(len(counts)), key=lambda place: (-counts[place], place))

    def ends(self, optimizer: Any) -> bool:
        """Note a step of the optimizer: whether it ends a step of the training.

        The first step of another optimizer does not: it is not yet known how often it comes.
        """
        key = id(optimizer)
        if self._settled is not None:
            return key == self._settled
        first = key not in self._steps
        if first:
            self.optimizers.append(optimizer)
        self._steps[key] = self._steps.get(key, 0) + 1
        if first and len(self._steps) > 1:
            return False
        return list(self._steps)[self.chosen] == key

    def settle(self) -> None:
        """Keep the one that is chosen."""
        self._settled = list(self._steps)[self.chosen]
