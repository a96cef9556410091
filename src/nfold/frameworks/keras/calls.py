"""The steps of an epoch as calls: each makes one or several steps on batches of one size.

Calls of one shape make a group, so that a group's ids are one array and its program is compiled
once. With k steps a call, what does not fill a call is made one step at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nfold.frameworks.stream import Cut, Ids, mixed


@dataclass(frozen=True)
class Group:
    """Consecutive calls of one shape: ``ids`` are int64 [calls, steps per call, batch]."""

    ids: Ids

    @property
    def steps(self) -> int:
        """Steps of one call."""
        return int(self.ids.shape[1])

    @property
    def count(self) -> int:
        """Samples of one step."""
        return int(self.ids.shape[2])

    def hashes(self) -> list[int]:
        """The sample hash of every call, as ``stream.sample_hash`` has it."""
        rows = mixed(self.ids).reshape(len(self.ids), -1)
        found: list[int] = rows.sum(axis=1, dtype=np.uint64).tolist()
        return found


def groups(order: Ids, cuts: Sequence[Cut], steps_per_call: int) -> Iterator[Group]:
    """The calls that compute ``cuts`` of an epoch's ``order``: whole ones, singles, the rest."""
    if not cuts:
        return
    batch = cuts[0].global_count
    whole = sum(cut.global_count == batch for cut in cuts)
    together = whole // steps_per_call * steps_per_call
    for first, last, steps in ((0, together, steps_per_call), (together, whole, 1)):
        if last > first:
            ids = order[first * batch : last * batch]
            yield Group(ids.reshape(-1, steps, batch))
    if whole < len(cuts):
        yield Group(order[cuts[-1].places].reshape(1, 1, -1))
