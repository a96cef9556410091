"""Doses in a script of two ranks, as the benchmark of diagnoses starts it."""

from __future__ import annotations

import pytest
from own_clock import slowest_ms
from planted_target import Planted
from targets import Script


@pytest.mark.slow(parts=8)
@pytest.mark.integration
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("shared_data")
def test_two_ranks_spend_at_least_what_is_asked_for() -> None:
    script = Script("ddp", "cpu:2", arguments=("--width", "1", "--batch", "8"))
    doses = dict.fromkeys(("imbalance", "input", "synchronization", "link", "layout"), 2.0)
    # The two busy waits cannot take less; the others are counts of what was timed.
    assert slowest_ms(script.run(doses))[0] >= doses["imbalance"] + doses["input"]


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("shared_data")
def test_doses_take_turns_in_one_run() -> None:
    script = Script("ddp", "cpu:2", arguments=("--width", "1", "--batch", "8"))
    steps_ms = slowest_ms(script.run([{}, {"imbalance": 20.0}, {"layout": 2.0}]))
    assert sorted(steps_ms) == [0, 1, 2]
    assert steps_ms[1] >= 20.0


@pytest.mark.integration
@pytest.mark.timeout(120)
@pytest.mark.slow
def test_doses_of_a_workload_take_turns_in_one_run() -> None:
    """Of 20 ms each; a step's buckets are one."""
    doses = ("imbalance", "input", "launch-bound", "link", "synchronization")
    steps_ms = slowest_ms(Planted("cpu:2").run([{}, *({cause: 20.0} for cause in doses)]))
    assert sorted(steps_ms) == [0, 1, 2, 3, 4, 5]
    assert all(steps_ms[turn] >= 20.0 for turn in range(1, 6))
