"""Doses in a script of two ranks, as the benchmark of diagnoses starts it."""

from __future__ import annotations

import pytest
from targets import Script


@pytest.mark.integration
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("shared_data")
def test_two_ranks_spend_at_least_what_is_asked_for() -> None:
    script = Script("ddp", "cpu:2", arguments=("--width", "1", "--batch", "8"))
    doses = dict.fromkeys(("imbalance", "input", "synchronization", "link", "layout"), 2.0)
    # The two busy waits cannot take less; the others are counts of what was timed.
    assert script.step_ms(doses) >= doses["imbalance"] + doses["input"]
