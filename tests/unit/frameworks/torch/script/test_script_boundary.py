"""Which optimizer's steps are counted."""

from __future__ import annotations

import pytest

from nfold.frameworks.torch.script.boundary import Boundary


@pytest.mark.parametrize(
    ("turns", "ends"),
    [
        ("AAAA", "1111"),
        # In turn: the last one, from the second round on.
        ("ABABAB", "100101"),
        # One that steps five times as often, before the other is known.
        ("AAABAAABAAAB", "111000010001"),
        # Many optimizers, each for one layer.
        ("ABCABCABC", "100001001"),
    ],
)
def test_the_one_that_steps_least_often_ends_a_step(turns: str, ends: str) -> None:
    optimizers = {name: object() for name in turns}
    boundary = Boundary()
    assert "".join(str(int(boundary.ends(optimizers[name]))) for name in turns) == ends


def test_after_the_warm_up_a_rare_one_changes_nothing() -> None:
    often, rare = object(), object()
    boundary = Boundary()
    assert all(boundary.ends(often) for _ in range(3))
    boundary.settle()
    assert not boundary.ends(rare)
    assert boundary.ends(often)
    assert boundary.optimizers == [often]
