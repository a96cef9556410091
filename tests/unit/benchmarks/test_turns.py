"""A rank's turns, against a driver that is a list of commands."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from typing import Any

import pytest
from turns import Channel, Stop, Turns


class Scripted:
    """Gives commands one after the other, then stops; keeps what it is told, and when."""

    def __init__(self, *commands: dict[str, Any]) -> None:
        self._commands = list(commands)
        self.told: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.told.append(message)

    def receive(self) -> dict[str, Any]:
        if not self._commands:
            raise Stop
        return self._commands.pop(0)


def trained(driver: Scripted, events: list[str], **options: Any) -> int:
    """Steps that a loop makes until it is stopped; every step's loss is its number."""
    counted = itertools.count(1)
    turns = Turns(
        driver,
        8,
        fence=lambda: events.append("fence"),
        barrier=lambda: events.append("barrier"),
        peak_memory_bytes=lambda: 7,
        **options,
    )
    with contextlib.suppress(Stop):
        for done in counted:
            events.append("step")
            turns.step(done)
    return next(counted) - 1


def test_a_rank_warms_up_skips_and_times_what_it_is_asked_for() -> None:
    driver = Scripted({"steps": 5, "skip": 2}, {"steps": 1, "skip": 0})
    assert trained(driver, [], warmup=3, queued_steps=9) == 1 + 3 + (2 + 5) + 1
    ready, first, second = driver.told
    assert ready["ready"]
    assert ready["queued_steps"] == 9
    assert 0 < ready["first_step_s"] <= ready["ready_s"]
    assert (first["steps"], first["samples"], first["loss"]) == (5, 40, 11.0)
    assert (second["steps"], second["samples"], second["loss"]) == (1, 8, 12.0)
    assert first["peak_memory_bytes"] == 7
    assert first["seconds"] > 0


def test_ranks_meet_before_the_clock_starts_and_wait_for_the_device_before_it_stops() -> None:
    events: list[str] = []
    trained(Scripted({"steps": 2, "skip": 1}), events, warmup=1)
    meeting = ["fence", "barrier", "fence"]
    assert events == ["step", "fence", "step", "fence", "step", *meeting, "step", "step", "fence"]


def test_calls_of_several_steps_count_whole() -> None:
    driver = Scripted({"steps": 60, "skip": 1})
    turns = Turns(driver, 2, warmup=10)
    with contextlib.suppress(Stop):
        while True:
            turns.step(1.5, steps=50)
    assert (driver.told[1]["steps"], driver.told[1]["samples"]) == (100, 200)


def test_a_channel_speaks_in_lines_and_ends_with_its_input() -> None:
    answers = io.StringIO()
    channel = Channel(io.StringIO('{"steps": 1, "skip": 0}\n{"stop": true}\n'), answers)
    channel.send({"a": 1})
    assert json.loads(answers.getvalue()) == {"a": 1}
    assert channel.receive() == {"steps": 1, "skip": 0}
    with pytest.raises(Stop):
        channel.receive()
    with pytest.raises(Stop):
        channel.receive()
