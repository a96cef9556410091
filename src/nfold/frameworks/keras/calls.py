"""The steps of an epoch as calls: each makes one or several steps on batches of one size.

Calls of one shape make a group, so that a group's ids are one array and its program is compiled
once. With k steps a call, what does not fill a call is made one step at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nfold.frameworks.stream import RankSlice, SampleIds, hash_ids


@dataclass(frozen=True)
class CallGroup:
    """Consecutive calls of one shape: ``ids`` are int64 [calls, steps per call, batch]."""

    ids: SampleIds

    @property
    def steps_per_call(self) -> int:
        """Steps of one call."""
        return int(self.ids.shape[1])

    @property
    def batch_size(self) -> int:
        """Samples of one step."""
        return int(self.ids.shape[2])

    def sample_hashes(self) -> list[int]:
        """The sample hash of every call, as ``stream.sample_hash`` has it."""
        rows = hash_ids(self.ids).reshape(len(self.ids), -1)
        found: list[int] = rows.sum(axis=1, dtype=np.uint64).tolist()
        return found


def group_calls(
    order: SampleIds, cuts: Sequence[RankSlice], steps_per_call: int
) -> Iterator[CallGroup]:
    """The calls that compute ``cuts`` of an epoch's ``order``: whole ones, singles, the rest."""
    if not cuts:
        return
    batch = cuts[0].global_count
    whole = sum(cut.global_count == batch for cut in cuts)
    together = whole // steps_per_call * steps_per_call
    for first, last, steps in ((0, together, steps_per_call), (together, whole, 1)):
        if last > first:
            ids = order[first * batch : last * batch]
            yield CallGroup(ids.reshape(-1, steps, batch))
    if whole < len(cuts):
        yield CallGroup(order[cuts[-1].positions].reshape(1, 1, -1))
