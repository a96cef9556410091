"""What doses cost by a script's own clock: their turns, what each adds, what is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from own_clock import IN_TURNS, Doses, Readings, added, printed_ms, rota, slowest_ms

ASKED = [("link", float(dose)) for dose in range(1, 7)]


class _Script:
    """Prints what the steps of two ranks take, 10 ms and its doses; each run drifts by 5 ms."""

    def __init__(self) -> None:
        self.asked: list[Doses | Sequence[Doses]] = []

    def __call__(self, asked: Doses | Sequence[Doses]) -> str:
        self.asked.append(asked)
        turns = [asked] if isinstance(asked, Mapping) else asked
        drift = 5 * len(self.asked)
        lines = [json.dumps({"settled": {"link 3": 7}})] if len(self.asked) == 1 else []
        for number, doses in enumerate(turns):
            taken = 10 + drift + sum(doses.values())
            lines += [json.dumps({"step_ms": ms, "turn": number}) for ms in (taken - 1, taken)]
        return "".join(lines)


def test_clocks_of_two_ranks_may_share_a_line_and_the_slowest_counts() -> None:
    text = 'x{"step_ms": 1.5, "turn": 0}{"step_ms": 2, "turn": 0}\n{"step_ms": 3.25, "turn": 1}'
    assert printed_ms(text) == [(0, 1.5), (0, 2.0), (1, 3.25)]
    assert slowest_ms(text) == {0: 2.0, 1: 3.25}


def test_steps_without_a_dose_stand_before_among_and_after_the_doses() -> None:
    order = rota(ASKED)
    assert [one for one in order if one] == ASKED
    assert (order[0], order[5], order[-1]) == (None, None, None)


def test_a_dose_is_compared_with_the_nearest_steps_without_any() -> None:
    order = [None, ("link", 2.0), None, ("link", 4.0), None]
    found = added(order, {0: 10.0, 1: 13.0, 2: 12.0, 3: 19.0, 4: 16.0})
    assert found == {("link", 2.0): 2.0, ("link", 4.0): 5.0}


def test_what_two_runs_differ_by_is_in_no_dose() -> None:
    readings, script = Readings(), _Script()
    readings.learn(ASKED, script)
    assert readings.ms == {one: pytest.approx(one[1]) for one in ASKED}
    assert (readings.settled, len(script.asked)) == ({"link 3": 7}, 3)
    readings.learn(ASKED, script)
    assert len(script.asked) == 3


def test_a_dose_of_what_workers_do_has_runs_of_its_own() -> None:
    assert "input" not in IN_TURNS
    script = _Script()
    # Every run is 5 ms slower than the one before, and the first of a pair has the dose.
    assert Readings(drifts=True).beside({"input": 3.0}, script) == pytest.approx(3 - 5)
    assert script.asked == [{"input": 3.0}, {}] * 3
    steady = Readings(drifts=False, healthy_ms=15.0)
    assert steady.beside({"input": 3.0}, _Script()) == pytest.approx(3)


def test_what_was_found_is_kept(tmp_path: Path) -> None:
    readings = Readings(drifts=False)
    readings.learn(ASKED, _Script())
    readings.keep(tmp_path / "clock.json")
    again = Readings(drifts=False)
    again.read(tmp_path / "clock.json")
    assert again == readings
