"""A data set that keeps its samples is told from one that computes them at every access."""

from __future__ import annotations

import pytest

from nfold.instrument.input.repeated_access import repeated_access_saving


class Computing:
    """100 samples of 10 ms each; ``now`` is the CPU time."""

    def __init__(self, kept: int) -> None:
        self.now, self.kept, self.last = 0.0, kept, list[int]()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index not in self.last:
            self.now += 0.01
        self.last = [*self.last, index][-self.kept :] if self.kept else []
        return index


@pytest.mark.parametrize(("kept", "saved"), [(100, 0.99), (0, 0.0), (4, 0.0)])
def test_a_cache_of_all_samples_saves_their_time(kept: int, saved: float) -> None:
    dataset = Computing(kept)
    assert repeated_access_saving(dataset, lambda: dataset.now) == saved


def test_fast_samples_and_those_that_fail_need_no_cache() -> None:
    assert repeated_access_saving(range(100), lambda: 0.0) == 0.0
    assert repeated_access_saving(iter(()), lambda: 0.0) == 0.0
