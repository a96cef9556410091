"""What is said beside the numbers of a budget."""

from __future__ import annotations

import dataclasses

import pytest

from explaining import ladder
from nfold.explain.doubts import LOOKING_MS, NOTICED, short
from nfold.seen import Seen


@pytest.mark.parametrize(
    ("device", "seen", "step_ms", "told"),
    [
        ("cpu", Seen(), 0.2, True),
        ("cpu", Seen(), LOOKING_MS / NOTICED + 0.1, False),
        ("cpu", None, 0.2, False),
        ("cuda", Seen(), 0.2, False),
    ],
)
def test_a_step_in_which_looking_is_noticed_casts_doubt(
    device: str, seen: Seen | None, step_ms: float, *, told: bool
) -> None:
    made = ladder()
    of = dataclasses.replace(made, seen=seen, plan=made.plan.edit(device=device))
    found = short(of, step_ms)
    assert [doubt.kind for doubt in found] == ["short_steps"] * told
    assert not told or "steps of 0.2 ms are short" in found[0].text
